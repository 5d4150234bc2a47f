"""Whole jobs whose job folder is in a real S3 server, below a prefix with spaces and plus signs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest, read_catalog
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.config.job import Job
from elastic_train.controller.job_folder import job_store
from elastic_train.storage.errors import StorageError
from elastic_train.storage.store import Store
from tests.chaos_proxy import chaos
from tests.cli.command import elastic_train
from tests.controller.s3_jobs import Lines, lines, whole_checkpoints
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.s3_server import S3Server, running_s3_server

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def s3_job(server: S3Server, bucket: str, corpus: Path, name: str, *overrides: str) -> Job:
    storage = f"s3://{bucket}/team a+b/runs 1+1"
    return make_job(corpus, storage, name, f"storage.endpoint_url={server.endpoint_url}", *overrides)


@pytest.fixture
def server(s3_environment: S3Server, s3_bucket: str) -> S3Server:
    """The shared server, with the shared bucket made and credentials in the environment (hosts inherit it)."""
    return s3_environment


def test_a_job_in_a_bucket_ends_with_its_curve_logs_and_checkpoints(
    server: S3Server, s3_bucket: str, corpus: Path, reference: Lines
) -> None:
    job = s3_job(server, s3_bucket, corpus, "whole", "hosts.min=4", "parallel.pp=2", "checkpoint.keep_last=2")
    with LocalJob(job) as run:
        run.start_hosts("aabb")
        assert run.finish()["state"] == "finished"
    assert_same_curve(lines(job, "steps"), reference)
    ledger = lines(job, "ledger")
    assert ledger[0]["event"] == "job_started"
    assert ledger[-1]["event"] == "job_finished"
    assert ledger[-1]["status"] == "finished"
    assert [line["generation"] for line in lines(job, "journal") if "generation" in line] == [1]
    assert "checkpoint_failed" not in {event["event"] for event in ledger}
    steps = whole_checkpoints(job)
    assert (len(steps), steps[-1]) == (2, 30)  # keep_last=2
    manifest = load_manifest(job_store(job), 30)
    assert (manifest.cursor, manifest.layout["pp"]) == (240, 2)
    names = {entry.path for entry in job_store(job).list()}
    assert {"job.json", "steps.jsonl", "ledger.jsonl", "journal.jsonl"} <= names
    keys = server.client().list_objects_v2(Bucket=s3_bucket, Prefix="team a+b/runs 1+1/whole/")["Contents"]
    assert "team a+b/runs 1+1/whole/checkpoints/step-00000030-c1.json" in {entry["Key"] for entry in keys}


def test_after_a_total_loss_the_job_goes_on_from_the_bucket_on_another_number_of_hosts(
    server: S3Server, s3_bucket: str, corpus: Path, reference: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(hosts: int) -> Job:
        return s3_job(server, s3_bucket, corpus, "total-loss", "parallel.pp=1", f"hosts.max={hosts}")

    with LocalJob(job(2)) as first:
        folder = first.coordinator.run.folder
        # A coordinator without last words: only what it flushes on its way gets into the bucket.
        folder.steps._interval = folder.journal._interval = 1e9
        monkeypatch.setattr(folder, "close", lambda: None)
        first.start_hosts("ab")
        first.wait(lambda status: any(event["step"] == 10 for event in first.told("checkpoint_committed")))
        for name in ("a0", "b1"):
            first.kill_host(name)
    last = list_checkpoints(job_store(job(2)))[-1]
    with LocalJob(job(3), "run1") as second:
        second.start_hosts("abc")
        assert second.finish()["state"] == "finished"
    assert_same_curve(lines(job(3), "steps"), reference)
    assert [event["step"] for event in second.told("resumed")] == [last]
    assert set(second.told("generation_formed")[0]["restored_bytes"]) == {"object"}
    generations = [line["generation"] for line in lines(job(3), "journal") if "generation" in line]
    assert generations == sorted(set(generations))
    assert whole_checkpoints(job(3))[-1] == 30


def test_damaged_objects_are_refused_by_name_and_the_job_falls_back(
    server: S3Server, s3_bucket: str, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """CK-06: a flipped byte in the newest checkpoint, a byte less in the one before; boto3 makes both."""
    settings = "hosts.max=1", "checkpoint.every_steps=1", "checkpoint.keep_last=9"
    job = s3_job(server, s3_bucket, corpus, "damaged", *settings)
    with LocalJob(job) as first:
        first.start_hosts("a")
        first.wait_step(1)
        while len(first.told("checkpoint_committed")) < 4:  # on a busy machine all steps may be done before
            first.pause_trainer()
            first.wait(lambda _: first.coordinator.run.checkpointer.running is None)
            first.resume_trainer()
            first.wait_step(first.status()["step"] + 1)
        assert first.finish()["state"] == "finished"
    store = job_store(job)
    store.delete(read_catalog(store).find(30).path)  # as if it had not come to its end
    whole, truncated, flipped = list_checkpoints(store)[-3:]
    objects = {step: next(iter(load_manifest(store, step).objects)) for step in (truncated, flipped)}

    def put(step: int, data: bytes) -> None:
        key = f"team a+b/runs 1+1/damaged/{objects[step]}"
        server.client().put_object(Bucket=s3_bucket, Key=key, Body=data)

    put(truncated, store.read(objects[truncated])[:-1])
    data = bytearray(store.read(objects[flipped]))
    data[len(data) // 2] ^= 1
    put(flipped, bytes(data))
    verify = "checkpoint", "verify", "damaged", "--all", "--storage", job.storage.uri
    done = elastic_train(*verify, "--endpoint-url", server.endpoint_url, cwd=tmp_path)
    assert done.returncode == 1
    size = len(data)
    assert re.search(
        rf"step {flipped}: damaged: object {objects[flipped]}, bytes .*: expected xxh3 .* found", done.stderr
    )
    assert re.search(
        rf"step {truncated}: damaged: object {objects[truncated]}, bytes {size - 1} to {size} \(tensor .*: "
        rf"expected {size} bytes, found {size - 1} bytes",
        done.stderr,
    )
    with LocalJob(job, "run1") as second:
        second.start_hosts("b")
        assert second.finish()["state"] == "finished"
    assert_same_curve(lines(job, "steps"), reference)
    refused = " ".join(event["detail"] for event in second.told("checkpoint_refused"))
    assert objects[flipped] in refused and objects[truncated] in refused
    assert second.told("generation_formed")[-1]["step"] == whole
    assert 30 in whole_checkpoints(job)
    committed = read_catalog(store).committed
    assert not {CheckpointId(flipped, 1), CheckpointId(truncated, 1)} & set(committed)  # anew they have a later claim


def test_of_two_submissions_of_one_job_at_once_the_later_goes_on_and_the_other_ends(
    server: S3Server, s3_bucket: str, corpus: Path, reference: Lines
) -> None:
    """A job submitted on two clusters at once; their layouts differ, and so do their objects."""
    started = threading.Barrier(2, timeout=120)
    runs: list[LocalJob] = []

    def submit(hosts: str) -> None:
        job = s3_job(server, s3_bucket, corpus, "twice", f"hosts.max={len(hosts)}", "checkpoint.keep_last=9")
        with LocalJob(job, f"run-{hosts}") as run:
            runs.append(run)
            started.wait()
            run.start_hosts(hosts)
            run.finish()

    threads = [threading.Thread(target=submit, args=(hosts,)) for hosts in ("a", "bc")]
    threads[0].start()
    while not runs:  # it has its claim
        time.sleep(0.01)
    threads[1].start()
    for thread in threads:
        thread.join()
    job = s3_job(server, s3_bucket, corpus, "twice")
    assert [run.coordinator.state.value for run in runs] == ["failed", "finished"]
    assert "another submission of this job has taken over: claim 1 on " in runs[0].coordinator.message
    assert runs[0].told("checkpoint_committed") == []
    assert [host.returncode for run in runs for host in run.hosts.values()] == [0] * 3
    saved = whole_checkpoints(job)
    # One that falls due while the last is still being written is told of, and made at a later step.
    assert {10, 20, 30} - set(saved) == {event["step"] for event in runs[1].told("checkpoint_skipped")} - set(saved)
    assert saved[-1] == 30
    catalog = read_catalog(job_store(job))
    assert {checkpoint.claim for checkpoint in catalog.committed} == {catalog.claim.number if catalog.claim else 0}
    assert_same_curve(lines(job, "steps"), reference)  # the other has not written over its log


def test_a_server_that_stands_still_stops_no_step_and_the_next_checkpoint_succeeds(
    corpus: Path, reference: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:  # FA-05
    with running_s3_server() as server:  # one of its own: it is stopped
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = server.create_bucket("stopped")
        job = s3_job(
            server,
            bucket,
            corpus,
            "outage",
            "hosts.min=2",
            "hosts.max=2",
            "checkpoint.every_steps=5",
            "storage.retry_seconds=60",
        )
        with LocalJob(job) as run:
            run.start_hosts("ab")
            run.wait(lambda status: bool(run.told("checkpoint_committed")))
            before = run.status()["step"]
            os.kill(server.pid, signal.SIGSTOP)
            try:
                # More than one checkpoint falls due while nothing is answered.
                run.wait_step(min(before + 11, 29))
                told = len(run.told("checkpoint_committed")) + len(run.told("checkpoint_failed"))
                assert told <= 2
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert run.finish()["state"] == "finished"
        assert_same_curve(lines(job, "steps"), reference)
        assert [event["cause"] for event in run.told("generation_formed")] == ["start"]
        assert whole_checkpoints(job)[-1] == 30
        chosen = choose_checkpoint(job_store(job)).manifest
        assert chosen is not None
        assert chosen.id == CheckpointId(30, 1)
        skipped = run.told("checkpoint_skipped")
        assert skipped
        assert all(event["running"] < event["step"] and event["seconds"] > 0 for event in skipped)


def test_a_server_that_is_gone_at_the_end_fails_the_job_and_leaves_nobody_waiting(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = server.create_bucket("gone")
        job = s3_job(server, bucket, corpus, "gone", "hosts.max=1", "storage.retry_seconds=1")
        with LocalJob(job) as run:
            run.start_hosts("a")
            run.wait_step(3)
            os.kill(server.pid, signal.SIGKILL)
            status = run.finish()
        assert (status["state"], status["step"]) == ("failed", 30)
        assert "the final checkpoint failed" in status["message"]
        assert server.endpoint_url in status["message"]
        assert run.hosts["a0"].returncode == 0


def test_a_bucket_that_is_not_there_is_named(server: S3Server, corpus: Path) -> None:
    job = s3_job(server, "no-such-bucket", corpus, "nowhere")
    with pytest.raises(StorageError, match=r"no-such-bucket.*the bucket does not exist"), LocalJob(job):
        pass
    assert "no-such-bucket" not in {entry["Name"] for entry in server.client().list_buckets()["Buckets"]}


EXPORT = """
import sys
asked = set()
sys.addaudithook(lambda event, args: asked.add(args[1][0]) if event == "socket.connect" else None)
sys.addaudithook(lambda event, args: asked.add(args[0]) if event == "socket.getaddrinfo" else None)
from elastic_train.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print(sorted(map(str, asked)))
"""


def test_data_in_the_bucket_too(
    server: S3Server, s3_bucket: str, corpus: Path, reference: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CK-13: one endpoint setting, no region; data, checkpoints and export use it. Path style, no CreateBucket."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    target = f"s3://{s3_bucket}/data sets/v1+2"
    with chaos(server) as proxy:
        job = s3_job(server, s3_bucket, corpus, "data", "hosts.max=1", f"data.uri='{target}'",
                     f"storage.endpoint_url={proxy.endpoint_url}")  # fmt: skip
        store = Store.open(target, job.storage)
        for path in corpus.rglob("*"):
            if path.is_file():
                store.write(str(path.relative_to(corpus)), [path.read_bytes()])
        with LocalJob(job) as run:
            run.start_hosts("a")
            assert run.finish()["state"] == "finished"
        assert_same_curve(lines(job, "steps"), reference)
        options = "--storage", job.storage.uri, "--endpoint-url", proxy.endpoint_url, "--out", str(tmp_path / "hf")
        command = [sys.executable, "-c", EXPORT, "export-hf", "data", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf" / "config.json").exists()
    assert done.stdout.splitlines()[-1] == "['127.0.0.1']"  # nobody else was asked, not even for a name
    assert all(target == f"/{s3_bucket}" or target.startswith((f"/{s3_bucket}/", f"/{s3_bucket}?"))
               for _, target in proxy.requests)  # fmt: skip
    assert [method for method, target in proxy.requests if target.partition("?")[0].strip("/") == s3_bucket
            and method not in ("HEAD", "GET")] == []  # fmt: skip
    assert {f"/{s3_bucket}/{kind}" for kind in ("data%20sets", "team%20a%2Bb")} <= {
        "/".join(target.split("/")[:3]) for _, target in proxy.requests
    }
