"""A job's wish for hosts reaches Ray's autoscaler, which orders machines, and ends with the job, however that ends."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.autoscaler._private.commands import get_or_create_head_node

from elastic_train.cluster.autoscaled import AutoscaledCluster, autoscaled_cluster
from elastic_train.cluster.cluster_file import read_cluster
from tests.autoscaling_cluster import ClusterWatch, kill_machine
from tests.cli.command import ROOT
from tests.jobs import make_job
from tests.local_job import lines_in_peace
from tests.ray_job import RayJob, until
from tests.recovered import assert_recovered

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

MACHINES_SECONDS = 240.0
"""So long do machines take to come, and to go, where much else is done."""
IS_ROOT = os.geteuid() == 0
JOB = (
    "parallel.pp=1",
    "failure.hang_seconds=600",
    "hosts.start_wait_seconds=0",
    "hosts.settle_seconds=0",
    "training.steps=100000",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[AutoscaledCluster]:
    """That of ``cluster/local.yaml``, at most four machines of one CPU, and impatient; nothing of it is left."""
    config = read_cluster(ROOT / "cluster" / "local.yaml") | {"idle_timeout_minutes": 0.2}
    with autoscaled_cluster(config, namespaces=IS_ROOT) as cluster:
        folder = str(cluster.folder)
        yield cluster
    assert not Path(folder).exists()
    assert not [process for process in psutil.process_iter(["cmdline"]) if folder in str(process.info["cmdline"])]
    if IS_ROOT:
        assert f"et{os.getpid()}." not in subprocess.check_output(["ip", "netns", "list"], text=True)


@pytest.fixture
def watch(cluster: AutoscaledCluster) -> Iterator[ClusterWatch]:
    with ClusterWatch(cluster.address) as watch:
        yield watch


def test_it_is_the_autoscaler_of_ray_up(cluster: AutoscaledCluster) -> None:
    """Contract: which of Ray's two autoscalers a cluster gets that `ray up` starts, and so the one that is tested."""
    default = inspect.getsource(get_or_create_head_node)
    assert 'os.getenv("RAY_UP_enable_autoscaler_v2", "1") == "1"' in default
    assert '"RAY_enable_autoscaler_v2": "1"' in default
    lines = [" ".join(psutil.Process(pid).cmdline()) for pid in cluster.nodes[0].pids()]
    assert [line for line in lines if "autoscaler/v2/monitor.py" in line], lines


def trains(run: RayJob, hosts: int, generation: int) -> dict[str, Any]:
    """The status once so many hosts have finished a step, in a generation not before that one."""

    def formed(status: dict[str, Any]) -> bool:
        ranks = sum(host["rank"] is not None for host in status["hosts"])
        return bool(status["generation"] >= generation and ranks == hosts)

    step = run.wait(formed)["step"]
    return run.wait(lambda status: formed(status) and status["step"] > step)


@pytest.mark.timeout(900)
def test_machines_are_ordered_for_a_job_replaced_when_they_die_and_given_back_after_it(
    cluster: AutoscaledCluster, watch: ClusterWatch, corpus: Path, tmp_path: Path
) -> None:
    assert watch.look() == {"demand": [], "nodes": 0}
    job = make_job(corpus, tmp_path, "scales", "hosts.min=2", "hosts.max=4", *JOB)
    with RayJob(job, cluster.address) as run:
        run.wait(lambda status: bool(status["hosts"]), MACHINES_SECONDS)
        paused = run.pause()
        run.wait(lambda status: len(status["hosts"]) == 4, MACHINES_SECONDS)
        run.resume(paused)
        before = trains(run, hosts=4, generation=2)
        killed = before["hosts"][-1]
        kill_machine(killed["pid"])
        paused = run.pause(generation=before["generation"] + 1)
        run.wait(lambda status: len(status["hosts"]) == 4, MACHINES_SECONDS)
        run.resume(paused)
        after = trains(run, hosts=4, generation=before["generation"] + 2)
        nodes = {host["node"] for host in after["hosts"]}
        assert len(nodes) == 4
        assert killed["node"] not in nodes
        run.driver.send_signal(signal.SIGTERM)
        outcome = run.finish()
    assert (outcome["state"], outcome["exit_code"]) == ("killed", 143), outcome
    assert run.noise == []
    until(lambda: watch.look() == {"demand": [], "nodes": 0}, MACHINES_SECONDS)
    calm = make_job(corpus, tmp_path / "calm", "calm", *JOB, "hosts.max=1")
    causes = {"start", "growth", "host_lost"}
    assert_recovered(run.lines, lines_in_peace(calm, outcome["step"]), causes, tolerance=1e-4)


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_wish_of_a_waiting_job_ends_with_its_driver(
    cluster: AutoscaledCluster, watch: ClusterWatch, corpus: Path, tmp_path: Path, end: str
) -> None:
    """Five seats are more than there can ever be, so none is ordered."""
    with RayJob(make_job(corpus, tmp_path, "waits", "hosts.min=5", "hosts.max=5", *JOB), cluster.address) as run:
        until(lambda: watch.look()["demand"], MACHINES_SECONDS)
        assert run.status["hosts"] == []
        if end == "SIGTERM":
            run.driver.terminate()
            assert run.finish()["exit_code"] == 143
        else:
            run.driver.kill()
    until(lambda: watch.look() == {"demand": [], "nodes": 0}, MACHINES_SECONDS)
