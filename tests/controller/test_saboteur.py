"""Chaos against a job on real raylets: each kind of fault is done for real, and the job keeps its curve."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic_train.controller.local_cluster import LocalCluster
from tests.cli.command import elastic_train
from tests.controller.s3_jobs import lines
from tests.jobs import assert_same_curve, make_job
from tests.local_job import lines_in_peace
from tests.ray_job import RayJob, pools, processes, refill, until_none
from tests.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

LONG = ("training.steps=100000", "checkpoint.every_steps=50", "parallel.pp=1", "failure.hang_seconds=2")
TRACE = """
{"at": 0, "kind": "kill-trainer"}
{"at": 9, "kind": "hang"}
{"at": 20, "kind": "partition", "seconds": 1}
{"at": 20.1, "kind": "store-outage", "seconds": 1}
{"at": 20.2, "kind": "kill-host"}
{"at": 25, "kind": "kill-node"}
"""


@pytest.mark.timeout(600)
def test_a_trace_is_struck_and_told_and_changes_no_sample_and_no_loss(
    ray_cluster: LocalCluster, corpus: Path, tmp_path: Path
) -> None:
    refill(ray_cluster, nodes=2, cpus=2)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    with RayJob(make_job(corpus, tmp_path, "chaos", *LONG), ray_cluster.address) as run:
        run.wait(lambda status: status["step"] >= 3 and sum(host["rank"] is not None for host in status["hosts"]) == 4)
        arguments = ("chaos", "replay", "chaos", "--trace", str(trace), "--address", ray_cluster.address)
        done = elastic_train(*arguments, cwd=tmp_path)
        run.driver.send_signal(signal.SIGTERM)
        outcome = run.finish()
    assert (outcome["state"], outcome["exit_code"]) == ("killed", 143), outcome
    assert done.returncode == 0, done.stderr
    for line in ("kill-trainer: rank", "hang: rank", "kill-host:", "kill-node: node"):
        assert line in done.stdout, done.stdout
    assert "partition: not done; 127.0.0." in done.stdout
    assert "store-outage: not done; storage.uri=" in done.stdout
    assert "4 faults" in done.stdout
    assert [event["kind"] for event in run.events("chaos")] == [
        "kill-trainer",
        "hang",
        "partition",
        "store-outage",
        "kill-host",
        "kill-node",
    ]
    causes = {event["cause"] for event in run.events("trouble")}
    assert {"trainer_killed", "hang", "host_lost"} <= causes, (done.stdout, run.events("trouble"))
    calm = make_job(corpus, tmp_path / "calm", "calm", *LONG, "hosts.max=1")
    assert_same_curve(run.lines("steps"), lines_in_peace(calm, outcome["step"]), tolerance=1e-4)
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
    assert not {"trouble", "rolled_back", "checkpoint_refused"} & {event["event"] for event in ledger}
    assert len([event for event in ledger if event["event"] == "generation_adopted"]) == 1
    assert [e["cause"] for e in ledger if e["event"] == "generation_formed"] == ["start", "preemption"]
    calm = make_job(corpus, tmp_path / "calm", "calm", *LONG, "hosts.max=1")
    assert_same_curve(lines(job, "steps"), lines_in_peace(calm, outcome["step"]), tolerance=1e-4)
