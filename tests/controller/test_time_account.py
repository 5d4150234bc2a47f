from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.time_causes import Cause
from elastic_train.controller.formation import Formation
from elastic_train.controller.time_account import TimeAccount, account_of_runs, largest_causes
from tests.jobs import make_job
from tests.local_job import LocalJob


def told(seconds: float, **parts: Any) -> dict[str, Any]:
    """What a trainer says of its step."""
    return {"seconds": seconds, "stall_seconds": 0.0, "data_seconds": 0.0, "eval_seconds": 0.0, **parts}


class Hosts:
    """Hosts and an account whose clock is ``now``."""

    def __init__(self, count: int = 2) -> None:
        self.now = 100.0
        self.account = TimeAccount(lambda: self.now)
        for host in range(count):
            self.account.joined(host)

    def later(self, seconds: float) -> Hosts:
        self.now += seconds
        return self

    def form(self, members: int = 2, step: int = 0, *, starts: bool = False) -> None:
        """Teardown 1 s, form 2 s, restore 3 s."""
        for host in range(3):
            self.account.ready(host)
        self.account.formed(range(members), step, starts=starts)
        for seconds, cause in ((1, Cause.FORM), (2, Cause.RESTORE), (3, Cause.FIRST_STEP)):
            self.now += seconds
            self.account.enter(cause)

    def step(self, step: int, seconds: float = 4.0, **parts: Any) -> None:
        self.now += seconds
        self.account.step_finished(step, {host: told(3.0, **parts) for host in range(3)})

    def seconds(self) -> dict[str, Any]:
        report = self.account.report()
        assert report["host_seconds"] == pytest.approx(sum(report["seconds"].values()))
        return {cause: pytest.approx(seconds) for cause, seconds in report["seconds"].items()}


def test_start_and_steps() -> None:
    hosts = Hosts()
    hosts.later(5).form(starts=True)
    hosts.step(1)
    assert hosts.seconds() == {"start": 2 * (5 + 6 + 1), "useful": 2 * 3.0}
    hosts.step(2, stall_seconds=0.5, data_seconds=0.25, eval_seconds=1.0)
    assert hosts.seconds() == {
        "start": 24.0,
        "useful": 2 * (3 + 2.25),
        "checkpoint_stall": 1.0,
        "data_wait": 0.5,
        "evaluation": 2.0,
    }
    hosts.later(1)  # into step 3
    assert hosts.account.report()["seconds"]["useful"] == pytest.approx(2 * (3 + 2.25 + 1))
    assert hosts.account.report()["goodput"] == pytest.approx(12.5 / (2 * 20))


def test_a_failure_and_its_echoes() -> None:
    hosts = Hosts(3)
    hosts.form(starts=True)
    hosts.step(1)
    before = dict(hosts.account.report()["seconds"])
    at = hosts.now
    hosts.later(9)
    hosts.account.failed(at + 8.5, at + 9)  # an echo
    hosts.account.failed(at + 2, at + 9)
    hosts.account.left(1)
    hosts.later(1)
    hosts.account.formed([0, 2], 1)
    hosts.later(2)
    hosts.account.enter(Cause.FORM)
    after = hosts.account.report()["seconds"]
    grown = {cause: seconds - before.get(cause, 0.0) for cause, seconds in after.items()}
    assert grown == pytest.approx(
        {
            "start": 0.0,
            "useful": 0.0,
            "lost_step": 2 * 2.0,
            "detection": 2 * 7.0,
            "teardown": 1.0 + 2 * 2.0,  # host 1 is gone, host 2 was a spare until the decision
            "idle_spare": 10.0,
        }
    )


def test_the_first_step_counts_as_work_up_to_a_usual_one() -> None:
    hosts = Hosts()
    hosts.form(starts=True)
    hosts.step(1)
    hosts.step(2)
    useful = hosts.account.report()["seconds"]["useful"]
    hosts.account.failed(hosts.now, hosts.now)
    hosts.form(step=2)
    hosts.now += 10
    hosts.account.step_finished(3, {host: told(8.0) for host in range(2)})
    seconds = hosts.account.report()["seconds"]
    assert seconds["useful"] - useful == pytest.approx(2 * 3.0)
    assert seconds["first_step"] == pytest.approx(2 * 7.0)
    assert (seconds["teardown"], seconds["form"], seconds["restore"]) == (2.0, 4.0, 6.0)


def test_steps_done_again_are_replayed() -> None:
    hosts = Hosts()
    hosts.form(starts=True)
    for step in (1, 2, 3):
        hosts.step(step)
    useful = hosts.account.report()["seconds"]["useful"]
    hosts.account.failed(hosts.now, hosts.now)
    hosts.form(step=1)
    for step in (2, 3):
        hosts.step(step)
    assert hosts.account.report()["seconds"]["useful"] == pytest.approx(useful)
    assert hosts.account.report()["seconds"]["replayed"] == pytest.approx(2 * (3.0 + 4.0))
    hosts.step(4)
    assert hosts.account.report()["seconds"]["useful"] == pytest.approx(useful + 8.0)


def test_steps_left_out_are_no_useful_ones() -> None:
    hosts = Hosts()
    hosts.form(starts=True)
    for step in (1, 2):
        hosts.step(step)
    useful = hosts.account.report()["seconds"]["useful"]
    hosts.step(3, stall_seconds=0.5, skipped="loss is nan")
    assert (hosts.seconds()["useful"], hosts.seconds()["skipped"]) == (useful, 2 * 3.5)
    assert hosts.seconds()["checkpoint_stall"] == 1.0
    hosts.account.failed(hosts.now, hosts.now)
    hosts.form(step=2)
    hosts.step(3, skipped="loss is nan")  # of this generation the first, and it has been left out before
    assert (hosts.seconds()["skipped"], hosts.seconds()["replayed"]) == (7.0, 2 * 3.0)
    hosts.step(4)
    assert hosts.seconds()["useful"] == useful + 8.0


def test_a_step_left_out_whose_last_news_comes_with_the_next_generation() -> None:
    hosts = Hosts()
    hosts.form(starts=True)
    hosts.step(1)
    hosts.later(3)
    hosts.account.failed(hosts.now, hosts.now)
    hosts.account.formed([0, 1], 2, skipped=True)
    assert hosts.seconds()["skipped"] == 6.0
    assert "lost_step" not in hosts.seconds()


def test_steps_of_an_earlier_run_are_replayed() -> None:
    hosts = Hosts()
    hosts.account.resumed(10, 2)
    hosts.form(step=10, starts=True)
    for step in (11, 12, 13):
        hosts.step(step)
    seconds = hosts.account.report()["seconds"]
    assert (seconds["replayed"], seconds["useful"]) == (pytest.approx(14.0), pytest.approx(8.0))


@pytest.mark.parametrize("news", ["late", "with the next generation"])
def test_a_step_whose_last_news_comes_after_the_failure(news: str) -> None:
    hosts = Hosts()
    hosts.form(starts=True)
    hosts.step(1)
    useful = hosts.account.report()["seconds"]["useful"]
    hosts.later(3)
    hosts.account.failed(hosts.now, hosts.now)
    if news == "late":
        hosts.step(2, seconds=0.0)
    hosts.later(1)
    hosts.account.formed([0, 1], 2)
    seconds = hosts.account.report()["seconds"]
    assert seconds["useful"] - useful == pytest.approx(6.0)
    assert "lost_step" not in seconds
    assert seconds["teardown"] == pytest.approx(2.0)


def test_waiting_newcomers_and_the_end() -> None:
    hosts = Hosts()
    hosts.form(starts=True)
    hosts.step(1)
    hosts.account.failed(hosts.now, hosts.now)
    hosts.account.left(1)
    hosts.account.waiting()
    hosts.later(7)
    hosts.account.joined(3)
    hosts.later(2)
    assert (hosts.seconds()["waiting"], hosts.seconds()["start"]) == (9.0, 14.0 + 2.0)
    hosts.account.ready(3)
    hosts.later(1)
    hosts.account.formed([0, 3], 1)
    hosts.account.enter(Cause.FIRST_STEP)
    hosts.account.step_finished(2, {0: told(1.0), 3: told(1.0)})
    assert hosts.seconds()["waiting"] == 11.0
    hosts.later(1)
    hosts.account.finishing()
    hosts.later(4)
    hosts.account.end()
    hosts.later(50)
    assert (hosts.seconds()["lost_step"], hosts.seconds()["finishing"]) == (2.0, 8.0)


def test_no_host_no_time() -> None:
    hosts = Hosts(0)
    hosts.later(3)
    report = hosts.account.report()
    assert (report["goodput"], report["host_seconds"], report["wall_seconds"]) == (0.0, 0.0, 3.0)


def test_runs_of_a_job_add_up() -> None:
    def line(event: str, **seconds: float) -> dict[str, Any]:
        return {"event": event, "seconds": seconds}

    ledger = [line("job_started"), line("time_account", useful=1.0), line("time_account", useful=6.0, start=2.0)]
    ledger += [line("job_started"), line("time_account", useful=3.0, start=1.0), line("job_finished")]
    account = account_of_runs(ledger)
    assert account == {"goodput": 0.75, "host_seconds": 12.0, "seconds": {"useful": 9.0, "start": 3.0}}
    assert largest_causes(account) == "start 25.0 %"
    assert account_of_runs([line("job_started")]) is None


def test_parts_of_a_recovery_add_up() -> None:
    formation = Formation(2, happened=10.0, seen=12.0, assigned=12.5)
    begins = [formation.did("forked", 13.0), formation.did("forked", 14.0), formation.did("group", 15.0, 0.5)]
    begins += [
        formation.did("build", 15.5, 0.25),
        formation.did("group", 15.75, 0.75),
        formation.did("build", 16.0, 0.5),
    ]
    begins += [formation.did("restore", 16.5), formation.did("restore", 17.0)]
    assert begins == [None, Cause.FORM, None, None, None, Cause.RESTORE, None, Cause.FIRST_STEP]
    assert formation.phases == {"group": 0.75, "build": 0.5}
    assert formation.seconds(21.0) == {
        "detection_seconds": 2.0,
        "teardown_seconds": 2.0,
        "form_seconds": 2.0,
        "restore_seconds": 1.0,
        "first_step_seconds": 4.0,
        "recovery_seconds": 11.0,
    }


PARTS = ("detection", "teardown", "form", "restore", "first_step")


def host_seconds(ledger: list[dict[str, Any]]) -> float:
    """Wall time x hosts, from when hosts came and went."""
    joined: dict[int, float] = {}
    total = 0.0
    end = next(line["time"] for line in ledger if line["event"] == "job_finished")
    for line in ledger:
        if line["event"] == "host_joined":
            joined[line["host"]] = line["time"]
        elif line["event"] == "host_lost":
            total += line["time"] - joined.pop(line["host"])
    return total + sum(end - begin for begin in joined.values())


def test_a_coordinator_that_comes_back_goes_on_from_the_last_account_before() -> None:
    now = 100.0
    account = TimeAccount(lambda: now)
    account.returned({"time": 90.0, "wall_seconds": 30.0, "seconds": {"useful": 55.0, "start": 5.0}})
    now = 102.0
    for host in (1, 2, 3):
        account.joined(host, back=True)
    account.joined(4)
    account.adopted([1, 2], 7, skipped_seconds=2.0)
    now = 105.0
    report = account.report()
    assert report["wall_seconds"] == 45.0
    useful, skipped = 55.0 + 2 * 13.0, 2 * 2.0
    outside = {"start": 5.0 + 3.0, "detection": 12.0, "idle_spare": 3.0}
    assert report["seconds"] == {"useful": useful, "skipped": skipped, **outside}
    account.step_finished(8, {host: told(3.0) for host in (1, 2)})
    assert account.report()["seconds"] == report["seconds"]
    account = TimeAccount(lambda: now)
    account.returned(None)
    account.joined(1, back=True)
    now = 106.0
    assert account.report()["seconds"] == {"detection": 1.0}


@pytest.mark.slow
def test_every_second_of_a_job_with_failures_has_one_cause(corpus: Path, tmp_path: Path) -> None:
    """A trainer is killed, one hangs, a host dies with a newcomer in its place, a spare idles."""
    job = make_job(
        corpus, tmp_path, "time", "parallel.pp=1", "parallel.dp_shard=2", "hosts.max=3", "failure.hang_seconds=2"
    )
    with LocalJob(job) as run:
        run.start_hosts("abc")
        run.wait_step(3)
        os.kill(run.trainer_pids()[0], signal.SIGKILL)
        run.wait(lambda status: status["generation"] == 2 and status["step"] >= 6)
        run.pause_trainer()  # until the hang is seen
        run.wait(lambda status: status["generation"] == 3 and status["state"] == "running")
        victim = next(host["pid"] for host in run.status()["hosts"] if host["rank"] == 0)
        os.kill(victim, signal.SIGKILL)
        run.start_host("d3", "d")
        assert run.finish()["state"] == "finished"
        ledger = run.lines("ledger")
    accounts = [line for line in ledger if line["event"] == "time_account"]
    last = accounts[-1]
    assert last["host_seconds"] == pytest.approx(sum(last["seconds"].values()), rel=1e-9)
    assert last["host_seconds"] == pytest.approx(host_seconds(ledger), rel=0.005)
    assert last["goodput"] == pytest.approx(last["seconds"]["useful"] / last["host_seconds"])
    assert set(last["seconds"]) >= {"useful", "start", "data_wait", "checkpoint_stall", "idle_spare", "finishing"}
    assert set(last["seconds"]) >= set(PARTS)
    assert "waiting" not in last["seconds"]
    formed = [line for line in ledger if line["event"] == "generation_formed"]
    assert [line["cause"] for line in formed] == ["start", "trainer_killed", "hang", "host_lost"]
    for line in formed:
        assert sum(line[f"{part}_seconds"] for part in PARTS) == pytest.approx(line["recovery_seconds"])
        assert all(line[f"{part}_seconds"] > 0 for part in PARTS[1:])
    assert next(line["detection_seconds"] for line in formed if line["cause"] == "hang") >= 2
    # Two members each; the ledger and the account say the same of the recoveries.
    recoveries = sum(line["detection_seconds"] for line in formed)
    assert last["seconds"]["detection"] == pytest.approx(2 * recoveries, rel=0.05)
