"""The coordinator, a process of its own here, is killed: trainers step on, and no step is lost, logged twice or not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.apart_job import ApartJob, continue_process, stop_process
from tests.controller.s3_jobs import lines as s3_lines
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]
STEPS = 60
LONG = (f"training.steps={STEPS}", "parallel.pp=1", "hosts.max=2")


@pytest.fixture(scope="module")
def long_reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """The lines of the uninterrupted run."""
    job = make_job(corpus, tmp_path_factory.mktemp("reference"), "long", *LONG, "hosts.max=1")
    with LocalJob(job) as run:
        run.start_host("only", "node")
        assert run.finish()["state"] == "finished"
        return run.lines("steps")


class S3ApartJob(ApartJob):
    """Its job folder is in a bucket."""

    def lines(self, name: str) -> Lines:
        return s3_lines(self.job, name)

    def finish(self, seconds: float = 180.0) -> dict[str, Any]:
        """Also waits until the log has its last line, which is put beside everything else."""
        status = super().finish(seconds)
        deadline = time.monotonic() + 30
        while not events(self, "job_finished"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return status


def events(run: LocalJob, kind: str) -> Lines:
    return [line for line in run.lines("ledger") if line["event"] == kind]


def test_trainers_step_on_without_it(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    with ApartJob(make_job(corpus, tmp_path, "running", *LONG)) as run:
        run.start_hosts("ab")
        trainers = set(run.wait_step(5) and run.trainer_pids())
        run.kill_coordinator()
        known = run.lines("steps")[-1]["step"]
        run.await_started(known + 10)
        stop_process(min(trainers))  # else the job would be over before anybody is there to see it
        run.start_coordinator()
        run.wait(lambda status: status["state"] == "running" and set(run.trainer_pids()) == trainers)
        continue_process(min(trainers))
        assert_no_step_lost(run, long_reference, ["start"])
        assert [event["generation"] for event in events(run, "generation_adopted")] == [1]
        assert events(run, "generation_adopted")[0]["steps"] >= 7


def step_of(run: ApartJob) -> int:
    """The newest one in the log."""
    return int(run.lines("steps")[-1]["step"])


def assert_no_step_lost(run: ApartJob, reference: Lines, causes: list[str]) -> None:
    assert run.finish()["state"] == "finished"
    assert_recovered(run.lines, reference, causes)
    assert not events(run, "rolled_back")


def test_killed_twice_and_in_the_end(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    """Again as soon as it is back, and then nobody is there when the last step is done."""
    with ApartJob(make_job(corpus, tmp_path, "twice", *LONG)) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        run.kill_coordinator()
        run.start_coordinator()
        run.kill_coordinator()
        run.await_started(STEPS)
        run.start_coordinator()
        assert_no_step_lost(run, long_reference, ["start"])
        assert len(events(run, "coordinator_returned")) == 2
        assert events(run, "checkpoint_committed")[-1]["step"] == STEPS


def test_trainer_dies_without_it(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    with ApartJob(make_job(corpus, tmp_path, "trainer", *LONG)) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        trainers = run.trainer_pids()
        run.kill_coordinator()
        known = step_of(run)
        run.await_started(known + 10)
        os.kill(trainers[0], signal.SIGKILL)
        run.start_coordinator()
        assert_no_step_lost(run, long_reference, ["start", "trainer_killed"])
        last = events(run, "generation_formed")[-1]
        assert (last["generation"], last["layout"]) == (2, "dp_shard2")
        assert last["step"] >= known + 7
        assert {event["pid"] for event in events(run, "host_joined")} == {host.pid for host in run.hosts.values()}


def test_a_host_dies_without_it(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    """Its last words are lost, what it has done is in its partner's memory."""
    with ApartJob(make_job(corpus, tmp_path, "host", *LONG, "failure.lease_seconds=3")) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        run.kill_coordinator()
        known = step_of(run)
        run.await_started(known + 10)
        run.kill_host("b1")
        run.start_coordinator()
        assert_no_step_lost(run, long_reference_without_words(long_reference, run), ["start", "coordinator_lost"])
        last = events(run, "generation_formed")[-1]
        assert (last["generation"], last["layout"]) == (2, "single")
        assert last["step"] >= known + 7


def long_reference_without_words(reference: Lines, run: ApartJob) -> Lines:
    """Once the job has ended: without slots and batch where the log has none, as nobody could say them any more."""
    assert run.finish()["state"] == "finished"
    silent = {line["step"] for line in run.lines("steps") if "slots" not in line}
    assert len(silent) >= 5  # those that the dead host has not told the coordinator before that
    return [line | ({"slots": None, "batch": None} if line["step"] in silent else {}) for line in reference]


def test_killed_while_the_first_generation_forms(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    """The trainers' store has died with it, so they cannot become a group any more."""
    with ApartJob(make_job(corpus, tmp_path, "forming", *LONG)) as run:
        run.start_hosts("ab")
        run.wait(lambda status: status["state"] == "forming" and len(run.trainer_pids()) == 2)
        stop_process(run.trainer_pids()[0])
        run.kill_coordinator()
        run.start_coordinator()
        assert_no_step_lost(run, long_reference, ["coordinator_lost"])
        assert [event["generation"] for event in events(run, "generation_formed")] == [2]


def test_killed_while_the_job_waits_and_while_it_ends(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    with ApartJob(make_job(corpus, tmp_path, "waiting", *LONG, "hosts.min=2")) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        run.kill_host("b1")
        run.wait(lambda status: status["state"] == "waiting")
        known = step_of(run)
        run.kill_coordinator()
        run.start_coordinator()
        run.wait(lambda status: status["state"] == "waiting")
        run.start_host("c2", "c")
        run.wait(lambda status: status["state"] == "running")
        assert events(run, "generation_formed")[-1]["step"] == known
        assert not events(run, "rolled_back")
        for name in ("a0", "c2"):
            stop_process(run.hosts[name].pid)  # so that the last checkpoint cannot be written
        run.stop()
        run.kill_coordinator()
        for name in ("a0", "c2"):
            continue_process(run.hosts[name].pid)
        run.start_coordinator()
        assert run.finish()["state"] == "killed"
        saved = events(run, "checkpoint_committed")[-1]["step"]
        assert saved == step_of(run) >= known
        assert_same_curve(run.lines("steps"), long_reference[:saved])


def test_lines_that_had_not_come_to_object_storage_are_told_by_the_hosts(
    s3_environment: S3Server, s3_bucket: str, corpus: Path, long_reference: Lines
) -> None:
    """Logs are put there every few seconds, and no step waits for that."""
    endpoint = f"storage.endpoint_url={s3_environment.endpoint_url}"
    with S3ApartJob(make_job(corpus, f"s3://{s3_bucket}/apart", "lines", endpoint, *LONG)) as run:
        run.start_hosts("ab")
        run.wait(lambda status: status["step"] >= 5 and bool(events(run, "generation_formed")))
        done = step_of(run)
        run.kill_coordinator()
        run.start_coordinator()
        assert_no_step_lost(run, long_reference, ["start"])
        assert len(events(run, "coordinator_returned")) == 1
        adopted = events(run, "generation_adopted")
        assert [event["generation"] for event in adopted] == [1]
        assert adopted[0]["step"] - adopted[0]["steps"] <= done < adopted[0]["step"]


def test_a_roll_back_that_had_not_come_to_storage(corpus: Path, long_reference: Lines, tmp_path: Path) -> None:
    """The logs are put back to what object storage would hold: that of the seconds before."""
    fixed = ("snapshot.partners=0", "checkpoint.every_steps=30")
    with ApartJob(make_job(corpus, tmp_path, "back", *LONG, *fixed)) as run:
        run.start_hosts("ab")
        run.wait(lambda status: status["step"] >= 48 and bool(events(run, "checkpoint_committed")))
        stop_process(run.trainer_pids()[0])
        old = {name: (tmp_path / "back" / name).read_bytes() for name in ("steps.jsonl", "journal.jsonl")}
        run.kill_host("b1")
        run.wait(lambda status: status["generation"] == 2 and status["step"] > 30)
        stop_process(trainer := run.trainer_pids()[0])
        again = step_of(run)
        assert 30 < again < len(old["steps.jsonl"].splitlines())
        run.kill_coordinator()
        for name, content in old.items():
            (tmp_path / "back" / name).write_bytes(content)
        run.start_coordinator()
        run.wait(lambda status: status["state"] == "running")
        assert run.status()["step"] <= again + 1
        continue_process(trainer)
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), long_reference)
        assert [line["generation"] for line in run.lines("steps")] == [1] * 30 + [2] * 30
        assert [event["generation"] for event in events(run, "generation_adopted")] == [2]
