"""A job's wish for hosts reaches Ray's autoscaler, which adds nodes, and ends with the job, however that ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.autoscaling_cluster import AutoscalingCluster
from tests.jobs import assert_same_curve, make_job
from tests.ray_job import RayJob, until

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

Lines = list[dict[str, Any]]
JOB = ("parallel.pp=1", "failure.hang_seconds=600", "hosts.start_wait_seconds=0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[AutoscalingCluster]:
    """No seats, and at most two nodes with one each."""
    with AutoscalingCluster(most_nodes=2) as cluster:
        yield cluster


def test_nodes_are_added_for_a_job_and_nothing_is_asked_for_after_it(
    cluster: AutoscalingCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    assert cluster.look() == {"demand": [], "nodes": 0}
    with RayJob(make_job(corpus, tmp_path, "scales", "hosts.max=2", *JOB), cluster.address) as run:
        paused = run.pause()
        run.wait(lambda status: len(status["hosts"]) == 2)
        run.resume(paused)
        outcome = run.finish()
        assert (outcome["state"], outcome["exit_code"]) == ("finished", 0), outcome
        assert_same_curve(run.lines("steps"), reference)
        assert run.noise == []
    until(lambda: not cluster.look()["demand"])
    assert cluster.look()["nodes"] == 2
    with RayJob(make_job(corpus, tmp_path, "next", "hosts.min=2", "hosts.max=2", *JOB), cluster.address) as run:
        assert run.finish()["state"] == "finished"
        assert [event["hosts"] for event in run.events("generation_formed")] == [2]


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_wish_of_a_waiting_job_ends_with_its_driver(
    cluster: AutoscalingCluster, corpus: Path, tmp_path: Path, end: str
) -> None:
    """Three seats are more than there can ever be."""
    with RayJob(make_job(corpus, tmp_path, "waits", "hosts.min=3", "hosts.max=3", *JOB), cluster.address) as run:
        until(lambda: cluster.look()["demand"])
        assert run.status["hosts"] == []
        if end == "SIGTERM":
            run.driver.terminate()
            assert run.finish()["exit_code"] == 143
        else:
            run.driver.kill()
    until(lambda: not cluster.look()["demand"], seconds=20.0)
