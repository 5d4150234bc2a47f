"""Members on one node only, and a host on another that takes no part: it keeps the copies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered

pytestmark = pytest.mark.slow
ONE_RANK = ("parallel.pp=1", "parallel.dp_shard=1", "hosts.max=2", "checkpoint.every_steps=1000")


def names_of(run: LocalJob) -> tuple[str, str]:
    """The host that computes, and the one that does not."""
    pids = {host["pid"]: host["rank"] for host in run.status()["hosts"]}
    ranked = {name: pids[process.pid] for name, process in run.hosts.items() if process.pid in pids}
    (works,) = (name for name, rank in ranked.items() if rank is not None)
    (waits,) = (name for name, rank in ranked.items() if rank is None)
    return works, waits


def test_the_only_node_that_computes_dies_and_no_step_is_lost(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Nothing is in storage: the host that took no part had a copy of each step."""
    with LocalJob(make_job(corpus, tmp_path, "spare", *ONE_RANK)) as run:
        run.start_hosts("ab")
        before = run.wait_step(5)
        run.kill_host(names_of(run)[0])
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "host_lost"])
        assert not run.told("rolled_back")
        assert run.told("generation_formed")[-1]["step"] >= before["step"]
        assert run.told("generation_formed")[-1]["restored_bytes"].keys() == {"image"}


def test_one_that_still_imports_has_copies_before_it_can_compute(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    options = (*ONE_RANK, "hosts.start_wait_seconds=0")
    with LocalJob(make_job(corpus, tmp_path, "later", *options)) as run:
        importing = run.start_host("b", "b", fresh=True)
        run.wait(lambda status: len(status["hosts"]) == 1)
        run.start_host("a", "a")
        run.wait_step(5)
        state = {host["pid"]: host["state"] for host in run.status()["hosts"]}[importing.pid]
        run.kill_host("a")
        assert run.finish()["state"] == "finished"
        assert state == "starting"
        assert_recovered(run.lines, reference, ["start", "growth"])  # "enough hosts are back"
        assert not run.told("rolled_back")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_a_host_that_only_keeps_copies_ends_no_generation(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path, how: signal.Signals
) -> None:
    """Killed, or standing still until its lease is over: then the steps do without its copies."""
    options = (*ONE_RANK, "failure.lease_seconds=2", "failure.heartbeat_seconds=0.2")
    with LocalJob(make_job(corpus, tmp_path, f"lost-{how.name}", *options)) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        waits = run.hosts[names_of(run)[1]]
        os.kill(waits.pid, how)
        run.wait(lambda status: len(status["hosts"]) == 1)
        run.wait_step(run.status()["step"] + 5)
        if how == signal.SIGSTOP:
            os.kill(waits.pid, signal.SIGCONT)
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start"])
        assert not run.told("trouble")
        assert run.told("fewer_copies")[0]["copies"] == 0
