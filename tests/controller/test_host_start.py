"""A host before it has found its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.controller.coordinator_link import Address
from elastic_train.controller.host import HostSettings, run_host
from elastic_train.controller.pool import PREFIX
from tests.jobs import make_job


def test_without_a_coordinator_nothing_is_put_into_shared_memory(corpus: Path, tmp_path: Path) -> None:
    """A host that is started late may be killed before it knows that its job is over."""
    memory = tmp_path / "memory"
    memory.mkdir()
    patience = "failure.coordinator_seconds=0.3"
    job = make_job(corpus, tmp_path, "over", f"snapshot.directory={memory}", patience)
    seen: list[list[Path]] = []

    def find() -> Address | None:
        seen.append(list(memory.glob(f"{PREFIX}*")))
        return None

    settings = HostSettings(("127.0.0.1", 1), "token", "run", "node", "127.0.0.1", job.as_dict())
    with pytest.raises(OSError):
        run_host(settings, find)
    assert len(seen) > 1
    assert not any(seen)
