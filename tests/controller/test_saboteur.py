"""Chaos against a job on real raylets: each kind of fault is done for real, and the job keeps its curve."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path

import pytest

from elastic_train.config.faults import Kind, every
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.controller.victims import choose
from tests.cli.command import elastic_train
from tests.controller.s3_jobs import lines
from tests.jobs import make_job
from tests.local_job import lines_in_peace
from tests.ray_job import RayJob, pools, processes, refill, until_none
from tests.recovered import assert_recovered, recoveries
from tests.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

LONG = ("training.steps=100000", "checkpoint.every_steps=50", "parallel.pp=1", "failure.hang_seconds=2")
TRACE = """
{"at": 0, "kind": "hang"}
{"at": 11, "kind": "partition", "seconds": 1}
{"at": 11.1, "kind": "store-outage", "seconds": 1}
{"at": 11.2, "kind": "kill-host"}
{"at": 16, "kind": "kill-node"}
"""
PERIOD = 4.0
SEED = 1


@pytest.mark.timeout(600)
def test_a_schedule_and_a_trace_are_struck_and_told_and_change_no_sample_and_no_loss(
    ray_cluster: LocalCluster, corpus: Path, tmp_path: Path
) -> None:
    """First trainers, one per period, whose times and victims follow from the seed alone; then one of each kind."""
    refill(ray_cluster, nodes=2, cpus=2)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    with RayJob(make_job(corpus, tmp_path, "chaos", *LONG), ray_cluster.address) as run:
        whole = run.wait(
            lambda status: status["step"] >= 3 and sum(host["rank"] is not None for host in status["hosts"]) == 4
        )
        here = ("--address", ray_cluster.address)
        schedule = ("--every", f"{PERIOD}s", "--for", f"{2 * PERIOD}s", "--seed", str(SEED))
        scheduled = elastic_train("chaos", "kill-trainer", "chaos", *schedule, *here, cwd=tmp_path)
        run.wait(lambda status: status["state"] == "running")
        done = elastic_train("chaos", "replay", "chaos", "--trace", str(trace), *here, cwd=tmp_path)
        run.driver.send_signal(signal.SIGTERM)
        outcome = run.finish()
    assert (outcome["state"], outcome["exit_code"]) == ("killed", 143), outcome
    assert scheduled.returncode == 0, scheduled.stderr
    struck = re.findall(r"([\d.]+) s  kill-trainer: (.+), at step", scheduled.stdout)
    expected = [choose(fault, whole["hosts"]) for fault in every(Kind.KILL_TRAINER, PERIOD, 2 * PERIOD, SEED, 20.0)]
    assert [victim for _, victim in struck] == [victim.label for victim in expected if victim]
    assert [int(float(at) / PERIOD) for at, _ in struck] == [1, 2]
    formed = re.search(r"2 faults, ([12]) generations formed", scheduled.stdout)  # one, if the second came during it
    assert formed, scheduled.stdout
    assert done.returncode == 0, done.stderr
    for line in ("hang: rank", "kill-host:", "kill-node: node"):
        assert line in done.stdout, done.stdout
    assert "partition: not done; 127.0.0." in done.stdout
    assert "store-outage: not done; storage.uri=" in done.stdout
    assert "3 faults" in done.stdout
    assert [event["kind"] for event in run.events("chaos")] == [
        "kill-trainer",
        "kill-trainer",
        "hang",
        "partition",
        "store-outage",
        "kill-host",
        "kill-node",
    ]
    causes = recoveries(run.lines("ledger"))
    assert causes[: 1 + int(formed[1])] == ["start", *["trainer_killed"] * int(formed[1])], (scheduled.stdout, causes)
    troubles = {event["cause"] for event in run.events("trouble")}
    assert {"hang", "host_lost"} <= troubles, (done.stdout, troubles)
    calm = make_job(corpus, tmp_path / "calm", "calm", *LONG, "hosts.max=1")
    assert_recovered(run.lines, lines_in_peace(calm, outcome["step"]), causes, tolerance=1e-4)
    until_none(lambda: processes(ray_cluster))
    assert not pools(run.job)


GENTLE_TRACE = """
{"at": 0, "kind": "store-outage", "seconds": 4}
{"at": 6, "kind": "kill-coordinator"}
{"at": 14, "kind": "drain", "seconds": 60}
"""


@pytest.mark.timeout(600)
def test_an_outage_a_dead_coordinator_and_a_drain_cost_no_step(
    s3_environment: S3Server, s3_bucket: str, corpus: Path, tmp_path: Path
) -> None:
    """The cluster is one of its own: its nodes need the credentials of the bucket."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GENTLE_TRACE)
    options = (*LONG, f"storage.endpoint_url={s3_environment.endpoint_url}")
    job = make_job(corpus, f"s3://{s3_bucket}/gentle", "gentle", *options)
    with LocalCluster() as cluster:
        refill(cluster, nodes=2, cpus=1)
        with RayJob(job, cluster.address) as run:
            run.wait(lambda status: status["step"] >= 3 and sum(h["rank"] is not None for h in status["hosts"]) == 2)
            arguments = ("chaos", "replay", "gentle", "--trace", str(trace), "--address", cluster.address)
            done = elastic_train(*arguments, cwd=tmp_path)
            run.wait(lambda status: status["layout"] == "single" and status["state"] == "running")
            run.driver.send_signal(signal.SIGTERM)
            outcome = run.finish()
    assert (outcome["state"], outcome["exit_code"]) == ("killed", 143), outcome
    assert done.returncode == 0, done.stderr
    assert "3 faults" in done.stdout
    assert "coordinator back at step" in done.stdout
    ledger = lines(job, "ledger")
    assert [event["kind"] for event in ledger if event["event"] == "chaos"] == [
        "store-outage",
        "kill-coordinator",
        "drain",
    ]
    assert not {"trouble", "rolled_back"} & {event["event"] for event in ledger}
    refused = [event["detail"] for event in ledger if event["event"] == "checkpoint_refused"]
    assert all("is incomplete" in detail for detail in refused), refused  # the save during which the coordinator died
    assert len([event for event in ledger if event["event"] == "generation_adopted"]) == 1
    peace = lines_in_peace(make_job(corpus, tmp_path / "calm", "calm", *LONG, "hosts.max=1"), outcome["step"])
    assert_recovered(partial(lines, job), peace, ["start", "preemption"], tolerance=1e-4)
