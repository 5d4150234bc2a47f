"""Whole jobs whose storage fails all the time, or not at all for a minute."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from elastic_train.config.job import Job
from tests.chaos_proxy import ChaosProxy, chaos
from tests.controller.s3_jobs import Lines, lines, whole_checkpoints
from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered
from tests.s3_server import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.waits]

OUTAGE_SECONDS = 60.0


@pytest.fixture
def proxy(s3_environment: S3Server) -> Iterator[ChaosProxy]:
    with chaos(s3_environment) as running:
        yield running


def job_behind(proxy: ChaosProxy, bucket: str, corpus: Path, name: str, *overrides: str) -> Job:
    return make_job(corpus, f"s3://{bucket}/chaos", name, f"storage.endpoint_url={proxy.endpoint_url}", *overrides)


def pause_until_saved(run: LocalJob, step: int) -> None:
    """The few steps could be over before the slow storage has taken ``step`` or one after it: they wait for each save.

    One that fails is tried again a few steps later.
    """
    saves = run.coordinator.run.checkpointer

    def saved() -> bool:
        return any(event["step"] >= step for event in run.told("checkpoint_committed"))

    while not saved():
        run.wait(lambda status: saved() or (saves.running is not None and status["state"] == "running"))
        run.pause_trainer()
        run.wait(lambda status: saves.running is None, 280)
        run.resume_trainer()


def test_a_job_in_chaos_loses_a_trainer_then_everything_and_keeps_its_curve(
    proxy: ChaosProxy, s3_bucket: str, corpus: Path, reference: Lines
) -> None:
    """A fifth of all requests fail, from the first to the last, also while the second run restores from storage."""

    def job(hosts: int) -> Job:
        sizes = f"hosts.max={hosts}", "parallel.pp=1", "checkpoint.every_steps=5", "checkpoint.keep_last=9"
        return job_behind(proxy, s3_bucket, corpus, "fifth", *sizes, "failure.hang_seconds=600")

    proxy.share = 0.2
    with LocalJob(job(2)) as first:
        first.start_hosts("ab")
        first.wait_step(3)
        os.kill(first.trainer_pids()[0], signal.SIGKILL)
        pause_until_saved(first, 10)
        for name in first.hosts:
            first.kill_host(name)
    with LocalJob(job(1), "run1") as second:
        second.start_hosts("c")
        assert second.finish()["state"] == "finished"
    injected, requests = dict(proxy.injected), len(proxy.requests)
    proxy.share = 0.0
    assert_recovered(partial(lines, job(1)), reference, ["start", "trainer_killed", "start"])
    assert len(injected) >= 5, injected
    assert sum(injected.values()) >= 0.1 * requests >= 5, (injected, requests)
    (resumed,) = second.told("resumed")
    assert resumed["step"] >= 10
    assert set(second.told("generation_formed")[0]["restored_bytes"]) == {"object"}
    committed = {event["step"] for event in first.told("checkpoint_committed") + second.told("checkpoint_committed")}
    assert committed <= set(whole_checkpoints(job(1)))
    assert 30 in committed
    ledger = lines(job(1), "ledger")
    assert {"trouble", "resumed", "checkpoint_committed", "job_finished"} <= {line["event"] for line in ledger}
    saves = [line for line in ledger if line["event"] == "checkpoint_committed"]
    assert 30 in {save["step"] for save in saves} <= committed
    assert sum(sum(save["retries"].values()) for save in saves) > 0, saves
    # Nothing committed is ever refused. What is was the save that the hosts died in: an upload without its manifest.
    for event in first.told("checkpoint_refused") + second.told("checkpoint_refused"):
        found = re.match(r"step (\d+) is incomplete", event["detail"])
        assert found and resumed["step"] < int(found[1]) <= 30, event


def test_a_minute_without_storage_stops_no_step_and_loses_no_line(
    proxy: ChaosProxy, s3_bucket: str, corpus: Path
) -> None:
    settings = (
        "training.steps=100000",
        "hosts.max=2",
        "hosts.min=2",
        "checkpoint.every_steps=5",
        "storage.retry_seconds=5",
    )
    job = job_behind(proxy, s3_bucket, corpus, "minute", *settings, "log.samples=false")
    with LocalJob(job) as run:
        run.start_hosts("ab")
        run.wait(lambda status: bool(run.told("checkpoint_committed")))
        proxy.outage("refuse")
        begun, before = time.monotonic(), run.status()["step"]
        halfway = 0
        while (left := begun + OUTAGE_SECONDS - time.monotonic()) > 0:
            time.sleep(min(left, OUTAGE_SECONDS / 2))
            halfway = halfway or run.status()["step"]
        after = run.status()["step"]
        told_during = list(run.events)
        proxy.outage("none")
        run.wait(lambda status: any(event["step"] > after for event in run.told("checkpoint_committed")))
        run.stop()
        assert run.finish()["state"] == "killed"
    failed = [event for event in told_during if event["event"] == "checkpoint_failed"]
    assert before < halfway < after
    assert failed
    for event in failed:
        assert "could not be reached for" in event["detail"] and f"s3://{s3_bucket}/chaos/minute" in event["detail"]
    assert [event["cause"] for event in run.told("generation_formed")] == ["start"]
    steps = [line["step"] for line in lines(job, "steps")]
    assert steps == list(range(1, run.coordinator.log.finished_step + 1))
    told = [event for event in run.events if event["event"] != "step"]
    assert lines(job, "ledger") == [{"format_version": 1, **told[0]}, *told[1:]]
    assert whole_checkpoints(job)[-1] == steps[-1]


def test_hosts_that_still_import_take_the_state_of_a_node_that_is_taken_away(
    proxy: ChaosProxy, s3_bucket: str, corpus: Path, reference: Lines
) -> None:
    """Nobody else has it, storage does not answer, and no deadline makes anybody leave: the copies do."""
    fixed = "parallel.pp=1", "hosts.min=2", "hosts.max=2", "checkpoint.every_steps=29", "storage.retry_seconds=2"
    job = job_behind(proxy, s3_bucket, corpus, "taken", *fixed, "failure.hang_seconds=600")
    with LocalJob(job) as run:
        run.start_hosts("aa")
        run.wait_step(3)
        run.pause_trainer()
        importing = [start_host_that_imports(run, node) for node in "bc"]
        run.wait(lambda status: len(status["hosts"]) == 4)
        proxy.outage("refuse")
        run.drain("a", None)
        run.resume_trainer()
        assert [run.hosts[name].wait(120) for name in ("a0", "a1")] == [0, 0]
        waiting = run.wait(lambda status: status["state"] == "waiting" and len(status["hosts"]) == 2)
        assert not run.told("checkpoint_committed")
        proxy.outage("none")
        for process in importing:
            process.resume()
        assert run.finish()["state"] == "finished"
    assert_recovered(partial(lines, job), reference, ["start", "growth"])
    assert not run.told("rolled_back")
    again = run.told("generation_formed")[1]
    assert again["step"] == waiting["step"] >= 3
    assert "object" not in again["restored_bytes"]


def start_host_that_imports(run: LocalJob, node: str) -> psutil.Process:
    """A host that joins at once, and whose forkserver does nothing until it is resumed; returns the forkserver."""
    host = psutil.Process(run.start_host(node, node, fresh=True).pid)
    while not (children := host.children()):
        assert host.is_running()
        time.sleep(0.001)
    children[0].suspend()
    return children[0]


def test_a_job_whose_last_steps_are_lost_with_their_only_host_has_not_finished(
    proxy: ChaosProxy, s3_bucket: str, corpus: Path
) -> None:
    """All steps were done, and none of them is in storage: that is no success."""
    settings = "hosts.max=1", "checkpoint.every_steps=100", "storage.retry_seconds=60"
    with LocalJob(job_behind(proxy, s3_bucket, corpus, "lost-end", *settings)) as run:
        run.start_hosts("a")
        run.wait_step(20)
        proxy.outage("refuse")
        run.wait(lambda status: status["state"] == "finishing")
        run.kill_host("a0")
        run.wait(lambda _: bool(run.told("checkpoint_failed")))
        proxy.outage("none")
        outcome = run.finish()
    assert outcome["state"] == "failed"
    assert "the final checkpoint failed" in outcome["message"]
    assert "no hosts have all of step 30 any more; step 0 is in storage" in outcome["message"]
    assert not run.told("checkpoint_committed")


def test_an_outage_on_demand_reaches_coordinator_and_hosts_and_is_over_by_itself(
    s3_environment: S3Server, s3_bucket: str, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """What `elastic-train chaos store-outage` asks for; the server itself is well all the time."""
    settings = "hosts.max=1", "checkpoint.every_steps=2", "storage.retry_seconds=0.5"
    endpoint = f"storage.endpoint_url={s3_environment.endpoint_url}"
    job = make_job(corpus, f"s3://{s3_bucket}/outage", "ordered", endpoint, *settings)
    with LocalJob(job) as run:
        run.start_hosts("a")
        run.wait_step(2)
        assert run.begin_outage(2.0) == ""
        run.wait(lambda _: bool(run.told("checkpoint_failed")))
        failed = run.told("checkpoint_failed")[0]
        assert s3_environment.endpoint_url.removeprefix("http://") in failed["detail"], failed
        assert run.finish()["state"] == "finished"
        assert run.told("checkpoint_committed")[-1]["step"] == 30 >= failed["step"]
    assert_recovered(partial(lines, job), reference, ["start"])
    with LocalJob(make_job(corpus, tmp_path, "on-disk", "hosts.max=1")) as run:
        assert run.begin_outage(2.0) == f"storage.uri={tmp_path} is no object storage; a job on s3:// can lose it"
