"""Where a restore takes its bytes from, and what happens when memory, a partner or storage does not give or take them.

Real hosts and trainers; the run must end with the steps, samples and losses it would have had.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.controller.job_folder import job_store
from elastic_train.storage.json_lines import read_json_lines
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.s3_server import S3Server, running_s3_server
from tests.small_memory import can_mount, grow, mounted, pool_of
from tests.storage.network import Network

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]


def memory_job(corpus: Path, tmp_path: Path, name: str, *overrides: str) -> Job:
    """Its snapshots are in a folder of the test's own."""
    (tmp_path / "memory").mkdir()
    return make_job(corpus, tmp_path, name, "parallel.pp=1", f"snapshot.directory={tmp_path / 'memory'}", *overrides)


@pytest.fixture
def small_memory(tmp_path: Path) -> None:
    assert can_mount(tmp_path / "probe"), "these tests need root, to mount a small tmpfs"


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that may be stopped, with its credentials in the environment (hosts inherit it)."""
    with running_s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def s3_job(server: S3Server, corpus: Path, tmp_path: Path, name: str, *overrides: str) -> Job:
    bucket = server.create_bucket(name)
    storage = (f"storage.uri=s3://{bucket}/runs", f"storage.endpoint_url={server.endpoint_url}")
    return memory_job(corpus, tmp_path, name, *storage, *overrides)


def test_with_two_copies_two_nodes_may_die_at_once(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with LocalJob(memory_job(corpus, tmp_path, "two-copies", "hosts.max=3", "snapshot.partners=2")) as run:
        run.start_hosts("abc")
        before = run.wait_step(5)
        run.kill_host("b1")
        run.kill_host("c2")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        last = run.told("generation_formed")[-1]
        assert last["step"] >= before["step"]
        assert set(last["restored_bytes"]) == {"image"}
        assert run.told("rolled_back") == []
        assert [event["copies"] for event in run.told("fewer_copies")][-1] == 0


def test_without_copies_a_lost_node_costs_the_steps_since_the_checkpoint_and_what_memory_has_of_it_is_used(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    options = ("hosts.max=2", "snapshot.partners=0", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    with LocalJob(memory_job(corpus, tmp_path, "no-copies", *options)) as run:
        run.start_hosts("ab")
        run.wait_step(2)
        step = pause_at_a_checkpoint(run)
        run.kill_host("b1")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        last = run.told("generation_formed")[-1]
        assert (last["step"], last["cause"]) == (step, "host_lost")
        assert set(last["restored_bytes"]) == {"image", "object"}  # rank 0 from memory, rank 1 from storage
        assert run.told("fewer_copies") == []


def pause_at_a_checkpoint(run: LocalJob) -> int:
    """Stop a trainer when the newest finished step is committed; returns the step."""
    while True:
        trainer = run.trainer_pids()[0]
        os.kill(trainer, signal.SIGSTOP)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            step = run.status()["step"]
            if any(event["step"] == step for event in run.told("checkpoint_committed")):
                return int(step)
            time.sleep(0.02)
        os.kill(trainer, signal.SIGCONT)
        run.wait_step(step + 1)


def spoil(job: Job, node: str) -> None:
    """The images on ``node`` are no longer what they were (mapped ones stay valid)."""
    for path in pool_of(job, node).glob("g*.img"):
        junk = path.with_suffix(".junk")
        junk.write_bytes(b"junk" * 2000)
        junk.replace(path)


def test_images_that_cannot_be_read_are_passed_over_then_dropped_and_never_end_the_job(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    job = memory_job(corpus, tmp_path, "unreadable", "hosts.max=2", "failure.max_errors=1")
    with LocalJob(job) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        restart_with_spoilt(run, job, ["a"])
        run.wait_step(15)
        step = restart_with_spoilt(run, job, ["a", "b"])
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        passed_over = run.told("restore_passed_over")
        assert any("-run0-a/g00000001-" in event["detail"] for event in passed_over), passed_over
        formed = run.told("generation_formed")
        assert formed[1]["cause"] == "trainer_killed"
        assert formed[1]["restored_bytes"]["remote"] > 0  # for the trainer on node a
        assert formed[-1]["cause"] == "unreadable"
        assert formed[-1]["step"] == 10
        assert set(formed[-1]["restored_bytes"]) == {"object"}
        assert [event["from_step"] for event in run.told("rolled_back")] == [step]


def restart_with_spoilt(run: LocalJob, job: Job, nodes: list[str]) -> int:
    """Spoil all images on ``nodes`` while a trainer stands still, and kill that; returns the finished step."""
    trainer = run.trainer_pids()[-1]
    os.kill(trainer, signal.SIGSTOP)
    step = settled_step(run)
    for node in nodes:
        spoil(job, node)
    os.kill(trainer, signal.SIGKILL)
    return step


def settled_step(run: LocalJob) -> int:
    """The newest finished step once no further one follows: a trainer stands still."""
    step = -1
    while step != (now := run.status()["step"]):
        step = now
        time.sleep(0.3)
    return step


def test_storage_that_is_away_during_a_restore_is_waited_for(
    s3_environment: S3Server, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    network = Network(s3_environment)
    network.mend()
    options = ("hosts.max=1", "storage.retry_seconds=1", "failure.max_errors=1")
    job = s3_job(s3_environment, corpus, tmp_path, "silent", *options, f"storage.endpoint_url={network.endpoint_url}")
    with LocalJob(job) as first:
        first.start_host("a0", "a")
        first.wait(lambda status: bool(first.told("checkpoint_committed")))
        first.kill_host("a0")
    with LocalJob(job, "run1") as second:
        network.cut()
        second.start_host("a0", "a")
        second.wait(lambda status: len(second.told("waiting")) >= 2)
        network.mend()
        assert second.finish()["state"] == "finished"
        assert_same_curve(second.told("step"), reference[10:])
        reasons = [event["reason"] for event in second.told("waiting")]
        assert "storage does not answer, trying again in 1 s" in reasons[0]
        assert "trying again in 2 s" in reasons[1]
        assert network.endpoint_url in reasons[0]
        (formed,) = second.told("generation_formed")
        assert (formed["cause"], set(formed["restored_bytes"])) == ("storage", {"object"})
        network.cut()


def test_a_node_without_room_for_its_snapshots_is_left_out(
    small_memory: None, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    job = memory_job(corpus, tmp_path, "no-room", "hosts.max=2", "failure.max_errors=1")
    with mounted(pool_of(job, "b"), 0.8e6), LocalJob(job) as run:
        run.start_hosts("ab")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        (told,) = run.told("no_room")
        assert told["node"] == "b"
        assert str(pool_of(job, "b")) in told["detail"]
        assert "bytes and" in told["detail"]
        assert [event["cause"] for event in run.told("generation_formed")] == ["no_room"]
        assert run.told("generation_formed")[0]["hosts"] == 1


def test_too_few_nodes_with_room_are_waited_for_and_a_host_that_comes_back_is_tried_again(
    small_memory: None, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    job = memory_job(corpus, tmp_path, "wait-for-room", "hosts.min=2", "hosts.max=2")
    with mounted(pool_of(job, "b"), 0.8e6), LocalJob(job) as run:
        run.start_hosts("ab")
        message = run.wait(lambda status: status["state"] == "waiting")["message"]
        assert "hosts.min=2" in message
        assert f"has no room: {pool_of(job, 'b')}" in message
        assert "give snapshot.directory more room" in message
        grow(pool_of(job, "b"), 50e6)
        run.kill_host("b1")
        run.start_host("b2", "b")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)


def test_a_partner_without_room_gets_no_more_copies(
    small_memory: None, corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    job = memory_job(corpus, tmp_path, "full-partner", "hosts.min=2", "hosts.max=2")
    with mounted(pool_of(job, "b"), 3.0e6), LocalJob(job) as run:  # its own two images have 2.3 MB
        run.start_hosts("ab")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        assert [event["cause"] for event in run.told("generation_formed")] == ["start"]
        (told,) = run.told("partner_full")
        assert told["node"] == "b"
        assert str(pool_of(job, "b")) in told["detail"]
        assert [event["copies"] for event in run.told("fewer_copies")] == [0]
        assert run.told("trouble") == []


@pytest.mark.parametrize("megabytes", [50, 5.5])
def test_a_stuck_upload_costs_at_most_one_image_more_and_is_given_up_when_there_is_no_room_for_that(
    small_memory: None, own_server: S3Server, corpus: Path, reference: Lines, tmp_path: Path, megabytes: float
) -> None:
    options = ("hosts.max=1", "checkpoint.every_steps=5", "storage.retry_seconds=60")
    job = s3_job(own_server, corpus, tmp_path, f"stuck-{megabytes:.0f}", *options)
    with mounted(pool_of(job, "a"), megabytes * 1e6), LocalJob(job) as run:
        run.start_host("a0", "a")
        run.wait(lambda status: bool(run.told("checkpoint_committed")))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            before = run.status()["step"]
            run.wait_step(min(before + 12, 29))
            buffers = {path.name[-5] for path in pool_of(job, "a").glob("g*.img")}
            failed = [event["detail"] for event in run.told("checkpoint_failed")]
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        assert run.finish()["state"] == "finished"
    assert_same_curve(read_json_lines(job_store(job), "steps.jsonl"), reference)
    assert [event["cause"] for event in run.told("generation_formed")] == ["start"]
    assert run.told("checkpoint_committed")[-1]["step"] == 30
    if megabytes == 50:
        assert buffers == {"0", "1", "2"}
        assert failed == []
    else:
        assert buffers == {"0", "1"}
        assert any("given up" in sentence and "-b2.img needs" in sentence for sentence in failed), failed
