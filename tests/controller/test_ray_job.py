"""Jobs on real raylets: hosts are Ray Train workers, and trainers, hosts, nodes and drivers are killed for real.

The tiny steps are over in seconds, so a trainer is stopped (SIGSTOP) wherever something slow has to happen in between.
A driver that prints anything of its own, such as an error of Ray Train's ``fit()``, fails the test.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.jobs import make_job
from tests.ray_job import RayJob, alive, kill_coordinator, pools, processes, refill, until_none
from tests.recovered import assert_recovered

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

Lines = list[dict[str, Any]]
PP2_DP2 = ("parallel.pp=2", "hosts.min=2", "failure.hang_seconds=600")
DATA = ("parallel.pp=1", "failure.hang_seconds=600")


@pytest.fixture
def cluster(ray_cluster: LocalCluster) -> LocalCluster:
    """Two worker nodes with two seats each, whatever the test before did to them."""
    refill(ray_cluster, nodes=2, cpus=2)
    return ray_cluster


def pids(status: dict[str, Any], node: str | None = None) -> set[int]:
    """Of the hosts, all or those on one node."""
    return {host["pid"] for host in status["hosts"] if node in (None, host["node"])}


def assert_good_end(run: RayJob, reference: Lines, causes: list[str] | set[str], *, rolled_back: bool = False) -> None:
    outcome = run.finish()
    assert (outcome["state"], outcome["exit_code"]) == ("finished", 0), outcome
    assert_recovered(run.lines, reference, causes)
    assert bool(run.events("rolled_back")) == rolled_back
    assert run.noise == []


def test_killed_trainer(cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with RayJob(make_job(corpus, tmp_path, "trainer", *PP2_DP2), cluster.address) as run:
        trainer = run.pause(step=3)
        before = run.status
        os.kill(trainer, signal.SIGKILL)
        assert_good_end(run, reference, ["start", "trainer_killed"])
        first, last = run.events("generation_formed")
        assert last["layout"] == first["layout"]
        assert last["step"] >= before["step"]
        assert {event["pid"] for event in run.events("host_joined")} == pids(before)
    until_none(lambda: processes(cluster))
    assert not pools(run.job)


def test_killed_host_is_replaced_on_its_node(
    cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    with RayJob(make_job(corpus, tmp_path, "host", *DATA), cluster.address) as run:
        run.pause(step=3)
        before = run.status
        victim = before["hosts"][-1]
        os.kill(victim["pid"], signal.SIGKILL)
        paused = run.pause(step=before["step"] + 1, generation=2)
        after = run.wait(lambda status: status["spares"] == 1)
        run.resume(paused)
        assert_good_end(run, reference, ["start", "host_lost", "growth"])
        assert pids(before) - pids(after) == {victim["pid"]}
        assert len(pids(after, victim["node"])) == len(pids(before, victim["node"])) == 2
        generations = run.events("generation_formed")
        assert [g["layout"] for g in generations] == ["dp_shard4", "dp_shard3", "dp_shard4"]
        assert generations[1]["step"] >= before["step"]


def test_killed_node_and_a_new_one(cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with RayJob(make_job(corpus, tmp_path, "node", *PP2_DP2), cluster.address) as run:
        run.pause(step=3)
        before = run.status
        victim = cluster.node_of(before["hosts"][-1]["pid"])
        assert victim is not None
        survivors = pids(before) - pids(before, before["hosts"][-1]["node"])
        cluster.kill_node(victim)
        paused = run.pause(step=before["step"] + 1, generation=2)
        assert pids(run.status) == survivors
        cluster.add_nodes(1, cpus=2)
        grown = run.wait(lambda status: status["spares"] == 2)
        assert survivors < pids(grown)
        run.resume(paused)
        assert_good_end(run, reference, ["start", "host_lost", "growth"])
        generations = run.events("generation_formed")
        assert [g["layout"] for g in generations] == ["pp2 x dp_shard2", "pp2", "pp2 x dp_shard2"]
        assert generations[1]["step"] >= before["step"]
        assert generations[2]["restored_bytes"].keys() <= {"image", "remote"}  # a node that joins keeps copies


def test_replacements_go_on_when_the_first_hosts_are_gone(
    cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """None of Ray Train's own workers is left; its group must neither end nor restart."""
    with RayJob(make_job(corpus, tmp_path, "joiner", "hosts.max=2", *DATA), cluster.address) as run:
        run.pause(step=3)
        first, second = run.status["hosts"]
        os.kill(first["pid"], signal.SIGKILL)
        run.pause(step=run.status["step"] + 1, generation=2)
        replaced = run.wait(lambda status: status["spares"] == 1)
        (joiner,) = pids(replaced) - {second["pid"]}
        os.kill(second["pid"], signal.SIGKILL)
        paused = run.pause(step=replaced["step"] + 1, generation=3)
        grown = run.wait(lambda status: len(status["hosts"]) == 2 and status["spares"] == 1)
        assert joiner in pids(grown)
        run.resume(paused)
        assert_good_end(run, reference, {"start", "host_lost", "growth"})
        assert len(run.events("host_joined")) == 4


def test_all_hosts_die_and_their_nodes_live(
    cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """New hosts on the same nodes find the snapshots of the old ones in shared memory: no step is lost."""
    with RayJob(make_job(corpus, tmp_path, "hosts", *PP2_DP2), cluster.address) as run:
        run.pause(step=3)
        before = run.status
        for pid in pids(before):
            os.kill(pid, signal.SIGKILL)
        assert_good_end(run, reference, {"start", "growth"})
        last = run.events("generation_formed")[-1]
        assert last["step"] >= before["step"]
        assert "image" in last["restored_bytes"]


def test_all_nodes_die_and_one_comes_back(
    cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """On from the last checkpoint, on fewer hosts than Ray Train's placement group had."""
    with RayJob(make_job(corpus, tmp_path, "nodes", *PP2_DP2), cluster.address) as run:
        run.pause(step=12)
        run.wait(lambda status: any(event["event"] == "checkpoint_committed" for event in status["last_events"]))
        for node in cluster.nodes[1:]:
            cluster.kill_node(node)
        run.wait(lambda status: status["state"] == "waiting")
        cluster.add_nodes(1, cpus=2)
        assert_good_end(run, reference, ["start", "growth"], rolled_back=True)
        last = run.events("generation_formed")[-1]
        assert (last["step"], last["layout"]) == (10, "pp2")


def test_one_job_of_a_name_at_a_time(cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, "same", "hosts.max=1", *DATA)
    with RayJob(job, cluster.address) as first:
        paused = first.pause(step=3)
        with RayJob(job, cluster.address) as second:
            assert second.driver.wait(120) == 2
        assert second.problem == "job 'same' is already running on this cluster; stop it or use another name"
        assert second.noise == []
        first.resume(paused)
        assert_good_end(first, reference, ["start"])


def test_killed_driver_and_resubmission_on_other_hosts(
    cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:  # FA-07
    """Total loss: nothing of the job survives its driver, and the next submission goes on from the last checkpoint."""
    with RayJob(make_job(corpus, tmp_path, "total", *DATA), cluster.address) as first:
        first.pause(step=12)
        first.wait(lambda status: any(event["event"] == "checkpoint_committed" for event in status["last_events"]))
        left = [pid for host in first.status["hosts"] for pid in family(host["pid"])]
        assert len(left) == 12  # host, forkserver and trainer, four times
        first.driver.kill()
        until_none(lambda: [*alive(left), *processes(cluster)])
    with RayJob(make_job(corpus, tmp_path, "total", "hosts.max=2", *DATA), cluster.address) as second:
        assert_good_end(second, reference, ["start", "start"])
        assert [event["step"] for event in second.events("resumed")] == [10]
        formed = second.events("generation_formed")[-1]
        assert (formed["step"], formed["layout"]) == (10, "dp_shard2")
    until_none(lambda: processes(cluster))
    assert not pools(second.job)


def test_killed_coordinator_comes_back(cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with RayJob(make_job(corpus, tmp_path, "headless", "hosts.max=2", *DATA), cluster.address) as run:
        paused = run.pause(step=3)
        before = run.status
        kill_coordinator(cluster)
        run.resume(paused)  # it has done all steps before Ray has started the next coordinator, or many of them
        assert_good_end(run, reference, ["start"])
        (adopted,) = run.events("generation_adopted")
        assert adopted["step"] > before["step"] and adopted["steps"] > 0
        assert {event["pid"] for event in run.events("host_joined")} == pids(before)
    until_none(lambda: processes(cluster))
    assert not pools(run.job)


def test_killed_coordinator_fails_a_job_that_does_not_wait_for_it(
    cluster: LocalCluster, corpus: Path, tmp_path: Path
) -> None:
    alone = "failure.coordinator_seconds=0"
    with RayJob(make_job(corpus, tmp_path, "headless", "hosts.max=1", alone, *DATA), cluster.address) as run:
        run.pause(step=3)
        kill_coordinator(cluster)
        outcome = run.finish()
        assert (outcome["state"], outcome["exit_code"]) == ("failed", 1)
        assert outcome["message"].startswith("the coordinator does not answer (status): ")
    until_none(lambda: processes(cluster))


def family(pid: int) -> list[int]:
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]
