"""A whole job whose checkpoints go to a local disk that is full for a while: a real, small tmpfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints
from elastic_train.controller.job_folder import job_store
from tests.controller.s3_jobs import whole_checkpoints
from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered
from tests.small_memory import can_mount, grow, mounted

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]


def test_on_a_full_disk_steps_go_on_and_once_there_is_room_the_next_checkpoint_is_committed(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    assert can_mount(tmp_path / "probe"), "this test needs root, to mount a small tmpfs"
    disk = tmp_path / "disk"
    job = make_job(corpus, disk, "full", "hosts.max=1", "checkpoint.every_steps=5", "checkpoint.keep_last=9")
    with mounted(disk, 0.5e6), LocalJob(job) as run:  # a checkpoint has 1.2 MB
        run.start_host("a", "a")
        run.wait(lambda status: bool(run.told("checkpoint_failed")) and status["step"] >= 8)
        assert run.told("checkpoint_committed") == []
        assert list_checkpoints(job_store(job)) == []
        grow(disk, 50e6)
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start"])
        committed = whole_checkpoints(job)
    failed = run.told("checkpoint_failed")
    assert failed[0]["step"] == 5
    for event in failed:
        assert "No space left" in event["detail"], event
        assert f"{disk}/full/checkpoints/step-{event['step']:08d}-" in event["detail"], event
    assert [event["step"] for event in run.told("checkpoint_committed")] == committed
    assert committed[0] >= failed[-1]["step"]  # the last one is tried until it is committed
    assert committed[-1] == 30
