from __future__ import annotations

from pathlib import Path

from elastic_train.controller.control_block import ControlBlock
from tests.controller.processes import program

TRAINER = """
import sys
from elastic_train.controller.control_block import ControlBlock
control = ControlBlock(sys.argv[1])
control.start(7)
for _ in range(3):
    control.beat()
print(control.finished_step, control.next_buffer, flush=True)
while control.finished_step < 7:
    pass
print(control.finished_step, control.next_buffer, flush=True)
sys.stdin.read()
"""

WATCHER = """
import sys
from elastic_train.controller.control_block import ControlBlock
control = ControlBlock(sys.argv[1])
print("watching", flush=True)
previous = changes = 0
while changes < 1000:
    step = control.finished_step
    buffer = control.next_buffer
    assert step >= previous, f"finished_step fell from {previous} to {step}"
    assert buffer >= step, f"step {step} was seen before its buffer ({buffer})"
    changes += step != previous
    previous = step
"""


def test_host_and_trainer_see_each_other(tmp_path: Path) -> None:
    path = tmp_path / "control"
    control = ControlBlock(str(path), create=True)
    assert (control.finished_step, control.next_buffer, control.started_step, control.beats) == (0, 0, 0, 0)
    control.allow(6, 1)
    with program(TRAINER, str(path)) as trainer:
        assert trainer.hear() == "6 1"
        assert (control.started_step, control.beats) == (7, 3)
        control.allow(7, 0)
        assert trainer.hear() == "7 0"
        assert (control.finished_step, control.next_buffer, control.started_step, control.beats) == (7, 0, 7, 3)
        assert trainer.end() == 0
    assert control.beats == 3  # what a dead trainer has written stays
    control.close(unlink=True)
    assert not list(tmp_path.iterdir())


def test_values_are_never_torn_and_a_step_is_seen_after_its_buffer(tmp_path: Path) -> None:
    """Carries from byte to byte are passed while the other process looks."""
    path, step = tmp_path / "control", 0
    control = ControlBlock(str(path), create=True)
    with program(WATCHER, str(path)) as watcher:
        assert watcher.hear() == "watching"
        while watcher.process.poll() is None:
            for _ in range(1000):
                step += 1
                control.allow(step, step)
        assert watcher.end() == 0
    control.close()


def test_a_new_block_begins_at_zero_where_an_old_one_was(tmp_path: Path) -> None:
    path = str(tmp_path / "control")
    old = ControlBlock(path, create=True)
    old.allow(2**40, 3)
    old.start(2**40 + 1)
    assert (old.finished_step, old.started_step) == (2**40, 2**40 + 1)
    new = ControlBlock(path, create=True)
    assert (new.finished_step, new.next_buffer, new.started_step, new.beats) == (0, 0, 0, 0)


def test_close_without_unlink_leaves_the_file_and_a_second_unlink_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "control"
    host, trainer = ControlBlock(str(path), create=True), ControlBlock(str(path))
    trainer.close()
    assert path.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()  # the whole pool was removed
    host.close(unlink=True)
