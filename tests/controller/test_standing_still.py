"""What stands still for longer than a lease, and then goes on as if nothing had been: nothing is lost by it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

pytestmark = pytest.mark.slow

LEASE = ("failure.lease_seconds=2", "failure.heartbeat_seconds=0.25", "failure.hang_seconds=600")
LONGER = 3.5


def pids(run: LocalJob) -> dict[str, int]:
    """Of the hosts that are connected, by node."""
    return {host["node"]: host["pid"] for host in run.status()["hosts"]}


def assert_nothing_lost(run: LocalJob, reference: list[dict[str, Any]], before: dict[str, int], step: int) -> None:
    assert run.finish()["state"] == "finished"
    assert_same_curve(run.lines("steps"), reference)
    assert not run.told("rolled_back")
    formed = run.told("generation_formed")
    assert len(formed) >= 2
    assert formed[0]["cause"] == "start"
    assert {generation["cause"] for generation in formed[1:]} <= {"host_silent", "host_lost", "growth"}
    assert formed[1]["step"] >= step
    assert set(formed[1]["restored_bytes"]) <= {"image", "remote"}  # memory: hosts come back in any order
    again = {event["node"]: event["pid"] for event in run.told("host_joined")[3:]}
    assert again == before  # the processes that there were, each under a new number
    assert len({event["host"] for event in run.told("host_joined")}) == len(run.told("host_joined"))


def test_the_coordinator(corpus: Path, reference: list[dict[str, Any]], tmp_path: Path) -> None:
    """Every host ends its trainer in time, for another coordinator's hosts could have gone on; then all come back."""
    with LocalJob(make_job(corpus, tmp_path, "still", "parallel.pp=1", "hosts.max=3", *LEASE)) as run:
        run.start_hosts("abc")
        step = run.wait_step(5)["step"]
        before, trainers = pids(run), run.trainer_pids()
        run.stand_still(LONGER)
        run.wait(lambda status: status["state"] == "running" and status["generation"] >= 2)
        assert not set(run.trainer_pids()) & set(trainers)
        assert_nothing_lost(run, reference, before, step)


def test_all_hosts(corpus: Path, reference: list[dict[str, Any]], tmp_path: Path) -> None:
    """Without a partner a rank's newest state is nowhere but on its own host: the job waits for all that come back."""
    fixed = ("parallel.pp=1", "hosts.max=3", "snapshot.partners=0", *LEASE)
    with LocalJob(make_job(corpus, tmp_path, "frozen", *fixed)) as run:
        run.start_hosts("abc")
        step = run.wait_step(5)["step"]
        before = pids(run)
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        run.wait(lambda status: status["state"] == "waiting" and not status["hosts"])
        for pid in before.values():
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)  # not the wait for a condition: they shall not come back at once
        assert_nothing_lost(run, reference, before, step)
