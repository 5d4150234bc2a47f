from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.layout import Layout
from elastic_train.controller.generation import Generation
from elastic_train.controller.hangs import culprit, hang
from elastic_train.controller.process_control import process_state
from elastic_train.controller.trouble import Trouble
from tests.cgroups import cgroup
from tests.controller.records import hosts
from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered


def generation(layout: Layout, *places: tuple[int, int, str]) -> Generation:
    """``places``: by rank the step and beat of the trainer and the state of its process."""
    made = Generation(3, layout, hosts("abcd"[: len(places)]), [[]] * len(places), 0, Trouble("start", ""), formed=10.0)
    for member, place in zip(made.members, places, strict=True):
        member.started_step, member.beats, member.process = place
    return made


def test_who_is_stopped_is_named_before_who_is_late() -> None:
    stopped = generation(Layout(dp_shard=3), (5, 40, "S"), (5, 44, "T"), (5, 44, "S"))
    assert culprit(stopped, 20.0) == ("rank 1 on host 2 (node b, pid 1002): its process is stopped", [1])
    stopped.last_progress = 15.0
    trouble = hang(stopped, 20.0, 4.0)
    assert trouble is not None and trouble.hosts == (stopped.members[1],)
    assert "for 5.0 s: rank 1 on host 2" in trouble.detail


def test_who_is_late_is_named_with_where_it_stands() -> None:
    late = generation(Layout(dp_shard=3), (5, 44, "S"), (5, 44, "S"), (5, 40, "R"))
    late.members[2].beats_since = 17.0
    assert culprit(late, 20.0) == (
        "rank 2 on host 3 (node c, pid 1003) has not entered the collective its peers wait in: "
        "step 5, beat 40 for 3.0 s, a peer is at step 5, beat 44",
        [2],
    )
    assert culprit(generation(Layout(dp_shard=2), (4, 50, "S"), (5, 44, "S")), 20.0)[1] == [0]


def test_stages_have_different_blocks_and_are_not_compared_by_beats() -> None:
    layout = Layout(pp=2, dp_shard=2)
    assert culprit(generation(layout, (5, 90, "S"), (5, 90, "S"), (5, 44, "S"), (5, 42, "S")), 20.0)[1] == [3]
    even = generation(layout, (5, 90, "S"), (5, 90, "S"), (5, 44, "S"), (5, 44, "S"))
    assert culprit(even, 20.0) == ("no rank is behind the others", [])
    assert culprit(generation(Layout(pp=2), (5, 44, "S"), (4, 90, "S")), 20.0)[1] == [1]


def test_who_is_blocked_is_named_when_nobody_is_late() -> None:
    blocked = generation(Layout(dp_shard=2), (5, 44, "S"), (5, 44, "D"))
    assert culprit(blocked, 20.0) == ("rank 1 on host 2 (node b, pid 1002): its process is blocked in the kernel", [1])


def test_state_of_a_process() -> None:
    assert process_state(os.getpid()) == "R"
    assert process_state(2**22 + 1) == ""


def trainer_of(run: LocalJob, rank: int) -> int:
    (pid,) = [host["trainer_pid"] for host in run.status()["hosts"] if host["rank"] == rank]
    return int(pid)


def running(number: int) -> Any:
    return lambda status: status["generation"] == number and status["state"] == "running"


@pytest.mark.slow
def test_hanging_rank_is_named(corpus: Path, reference: list[dict[str, Any]], tmp_path: Path) -> None:
    """First a process is stopped; then only the thread that computes is frozen, its process lives on."""
    job = make_job(corpus, tmp_path, "hang", "failure.hang_seconds=2", "hosts.max=2", "parallel.pp=1")
    with cgroup("freezer") as frozen, LocalJob(job) as run:
        run.start_hosts("ab")
        run.wait_step(3)
        os.kill(trainer_of(run, 1), signal.SIGSTOP)
        run.wait(running(2))
        thread = trainer_of(run, 0)  # its main thread has the number of the process
        (frozen / "freezer.state").write_text("FROZEN")
        (frozen / "tasks").write_text(str(thread))
        run.wait(lambda status: status["generation"] == 3)
        (frozen / "freezer.state").write_text("THAWED")  # else not even SIGKILL ends it
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "hang", "hang"])
    stopped, late = [event for event in run.lines("ledger") if event["event"] == "trouble"]
    assert stopped["cause"] == late["cause"] == "hang"
    assert "rank 1 on host" in stopped["detail"] and "its process is stopped" in stopped["detail"]
    assert ": rank 0 on host" in late["detail"]
    assert "has not entered the collective" in late["detail"] or "blocked in the kernel" in late["detail"]
