"""Whole jobs whose storage fails all the time, or not at all for a minute."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest
from elastic_train.checkpoint.verify import verify_checkpoint
from elastic_train.config.job import Job
from elastic_train.controller.job_folder import job_store
from elastic_train.storage.json_lines import read_json_lines
from tests.chaos_proxy import ALL, ChaosProxy, chaos
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]
OUTAGE_SECONDS = 60.0


@pytest.fixture
def proxy(s3_environment: S3Server) -> Iterator[ChaosProxy]:
    with chaos(s3_environment) as running:
        yield running


def job_behind(proxy: ChaosProxy, bucket: str, corpus: Path, name: str, *overrides: str) -> Job:
    return make_job(corpus, f"s3://{bucket}/chaos", name, f"storage.endpoint_url={proxy.endpoint_url}", *overrides)


def start_hosts(run: LocalJob, nodes: str) -> None:
    for index, node in enumerate(nodes):
        run.start_host(f"{node}{index}", node)


def lines(job: Job, name: str) -> Lines:
    return read_json_lines(job_store(job), f"{name}.jsonl")


def events(run: LocalJob, kind: str) -> Lines:
    return [event for event in run.events if event["event"] == kind]


def verified_checkpoints(job: Job) -> list[int]:
    """Steps that are committed; each is read in full and every checksum compared."""
    store = job_store(job)
    steps = list_checkpoints(store)
    for step in steps:
        assert verify_checkpoint(store, load_manifest(store, step)) == []
    return steps


def test_a_job_in_chaos_loses_a_trainer_then_everything_and_keeps_its_curve(
    proxy: ChaosProxy, s3_bucket: str, corpus: Path, reference: Lines
) -> None:
    """A fifth of all requests fail, from the first to the last, also while the second run restores from storage."""

    def job(hosts: int) -> Job:
        sizes = f"hosts.max={hosts}", "parallel.pp=1", "checkpoint.every_steps=5", "checkpoint.keep_last=9"
        return job_behind(proxy, s3_bucket, corpus, "fifth", *sizes)

    proxy.share = 0.2
    with LocalJob(job(2)) as first:
        start_hosts(first, "ab")
        first.wait_step(3)
        os.kill(first.trainer_pids()[0], signal.SIGKILL)
        first.wait(lambda status: any(event["step"] >= 10 for event in events(first, "checkpoint_committed")))
        for name in first.hosts:
            first.kill_host(name)
    with LocalJob(job(3), "run1") as second:
        start_hosts(second, "abc")
        assert second.finish()["state"] == "finished"
    injected = dict(proxy.injected)
    proxy.share = 0.0
    print(
        "requests",
        len(proxy.requests),
        "injected",
        injected,
        [
            (e["event"], e.get("step"), e.get("detail"))
            for e in first.events + second.events
            if e["event"].startswith("checkpoint")
        ],
    )
    assert_same_curve(lines(job(3), "steps"), reference)
    assert set(injected) == set(ALL)
    (resumed,) = events(second, "resumed")
    assert resumed["step"] >= 10
    assert set(events(second, "generation_formed")[0]["restored_bytes"]) == {"object"}
    committed = {
        event["step"] for event in events(first, "checkpoint_committed") + events(second, "checkpoint_committed")
    }
    assert committed <= set(verified_checkpoints(job(3)))
    assert 30 in committed
    ledger = [line["event"] for line in lines(job(3), "ledger")]
    assert {"trouble", "resumed", "checkpoint_committed", "job_finished"} <= set(ledger)
    assert events(second, "checkpoint_refused") == [] or all(
        "incomplete" in event["detail"] for event in events(second, "checkpoint_refused")
    )


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
        start_hosts(run, "ab")
        run.wait(lambda status: bool(events(run, "checkpoint_committed")))
        proxy.outage("refuse")
        begun, before = time.monotonic(), run.status()["step"]
        halfway = 0
        while (left := begun + OUTAGE_SECONDS - time.monotonic()) > 0:
            time.sleep(min(left, OUTAGE_SECONDS / 2))
            halfway = halfway or run.status()["step"]
        after = run.status()["step"]
        told_during = list(run.events)
        proxy.outage("none")
        run.wait(lambda status: any(event["step"] > after for event in events(run, "checkpoint_committed")))
        run.stop()
        assert run.finish()["state"] == "killed"
    failed = [event for event in told_during if event["event"] == "checkpoint_failed"]
    assert before < halfway < after
    assert failed
    for event in failed:
        assert "could not be reached for" in event["detail"] and f"s3://{s3_bucket}/chaos/minute" in event["detail"]
    assert [event["cause"] for event in events(run, "generation_formed")] == ["start"]
    steps = [line["step"] for line in lines(job, "steps")]
    assert steps == list(range(1, run.coordinator.finished_step + 1))
    print("steps before, halfway, after, end", before, halfway, after, steps[-1], "failed", failed[:2], len(failed))
    told = [event for event in run.events if event["event"] != "step"]
    assert lines(job, "ledger") == told
    assert verified_checkpoints(job)[-1] == steps[-1]
