from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_train.controller.agreement import Agreement
from elastic_train.controller.control_block import ControlBlock


@pytest.mark.parametrize("hear", [ControlBlock.allow, ControlBlock.lend], ids=["coordinator", "host"])
def test_rank_comes_to_the_barrier_once_it_has_heard_of_the_step(
    tmp_path: Path, hear: Callable[[ControlBlock, int, int], None]
) -> None:
    control = ControlBlock(str(tmp_path / "control"), create=True)
    came = threading.Semaphore(0)
    waiting = threading.Thread(target=Agreement(control, came.release).wait, args=(2,))
    waiting.start()
    hear(control, 1, 0)
    assert not came.acquire(timeout=0.05)
    hear(control, 2, 1)
    waiting.join(60)
    assert came.acquire(timeout=0) and not came.acquire(timeout=0)


def test_end_of_another_rank_is_an_error(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("gloo: connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        Agreement(ControlBlock(str(tmp_path / "control"), create=True), broken).wait(0)
