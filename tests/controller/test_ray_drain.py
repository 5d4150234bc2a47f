"""Ray is told that a node will be taken away: the job leaves it in time. And the head node dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.jobs import make_job
from tests.ray_job import RayJob, alive, drain, pools, processes, refill, until_none
from tests.recovered import assert_recovered

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

Lines = list[dict[str, Any]]
DATA = ("parallel.pp=1", "failure.hang_seconds=600", "hosts.max=2")


def test_a_drained_node_is_left_before_its_deadline_without_losing_a_step(
    ray_cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    refill(ray_cluster, nodes=2, cpus=1)
    with RayJob(make_job(corpus, tmp_path, "drain", *DATA), ray_cluster.address) as run:
        paused = run.pause(step=3)
        victim = run.status["hosts"][-1]
        node = ray_cluster.node_of(victim["pid"])
        assert node is not None
        assert drain(ray_cluster, victim["node"]) == ""
        run.wait(lambda status: any(event["event"] == "preemption_notice" for event in status["last_events"]))
        run.resume(paused)
        outcome = run.finish()
    ray_cluster.kill_node(node)  # nobody else is to be placed on it
    assert (outcome["state"], outcome["exit_code"]) == ("finished", 0), outcome
    assert_recovered(run.lines, reference, ["start", "preemption"])
    assert run.noise == []
    assert not run.events("rolled_back")
    assert not run.events("trouble")
    assert [g["layout"] for g in run.events("generation_formed")] == ["dp_shard2", "single"]
    (notice,) = run.events("preemption_notice")
    assert (notice["node"], notice["reason"]) == (victim["node"], "drained by Ray")
    assert 0 < notice["deadline_seconds"] <= 90
    (left,) = run.events("host_left")
    assert (left["node"], left["pid"]) == (victim["node"], victim["pid"])
    assert left["seconds_left"] > 0
    until_none(lambda: processes(ray_cluster))
    assert not pools(run.job)


def test_when_the_head_node_dies_the_job_goes_on_when_it_is_submitted_to_another_cluster(
    ray_cluster: LocalCluster, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """With the head go Ray's control and the job's coordinator; the hosts on the other nodes end by themselves."""
    job = make_job(corpus, tmp_path, "head", "failure.coordinator_seconds=3", *DATA)
    with LocalCluster() as doomed:
        doomed.add_nodes(1, cpus=2)
        with RayJob(job, doomed.address) as first:
            first.pause(step=12)
            first.wait(lambda status: any(event["event"] == "checkpoint_committed" for event in status["last_events"]))
            trainers = [host["trainer_pid"] for host in first.status["hosts"]]
            assert len(alive(trainers)) == 2
            doomed.kill_node(doomed.nodes[0])
            until_none(lambda: alive(trainers))  # the hosts' processes are Ray's, and end with its node
            assert first.driver.wait(120) != 0
    assert not pools(job)
    refill(ray_cluster, nodes=1, cpus=2)
    with RayJob(job, ray_cluster.address) as second:
        outcome = second.finish()
    assert (outcome["state"], outcome["exit_code"]) == ("finished", 0), outcome
    assert_recovered(second.lines, reference, ["start", "start"])
    assert [event["step"] for event in second.events("resumed")] == [10]
    generations = second.events("generation_formed")
    assert [g["step"] for g in generations] == [0, 10]
    assert set(generations[-1]["restored_bytes"]) == {"object"}
