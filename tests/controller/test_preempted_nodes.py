"""Nodes are taken away by appointment: the job goes on without them before they are gone, and loses no step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered
from tests.spot_instance import Metadata, notice_in, running_metadata

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with running_metadata() as server:
        yield server


def test_drained_nodes_leave_before_the_deadline_and_no_step_is_lost(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """There are no copies: what the leaving nodes alone have is read from them while they are still there."""
    with LocalJob(make_job(corpus, tmp_path, "drained", "parallel.pp=1", "hosts.max=3", "snapshot.partners=0")) as run:
        run.start_hosts("abc")
        run.wait_step(3)
        run.drain("b", 60.0)
        run.wait(lambda status: status["generation"] == 2)
        run.drain("c", 60.0)  # while that generation is being formed
        assert [leaves(run, host) for host in ("b1", "c2")] == ["preempted", "preempted"]
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "preemption", "preemption"])
        assert not run.told("rolled_back")
        assert not run.told("host_lost")
        assert not run.told("trouble")
        formed = run.told("generation_formed")
        assert [g["layout"] for g in formed] == ["dp_shard3", "dp_shard2", "single"]
        assert "node b is being taken away: test" in formed[1]["detail"]
        assert [(e["node"], e["deadline_seconds"]) for e in run.told("preemption_notice")] == [("b", 60.0), ("c", 60.0)]
        assert {event["node"] for event in run.told("host_left")} == {"b", "c"}
        assert all(0 < event["seconds_left"] < 60 for event in run.told("host_left"))


def test_when_too_few_are_left_the_state_is_saved_before_they_leave(
    corpus: Path, reference: Lines, tmp_path: Path, metadata: Metadata
) -> None:
    """The job waits, and goes on where it was on other machines: after the end of two spot instances, and after that of
    one which alone has the state, while the job waits already."""
    options = ("parallel.pp=1", "hosts.min=2", "hosts.max=2", "checkpoint.every_steps=29", "failure.hang_seconds=600")
    job = make_job(corpus, tmp_path, "few", *options, f"hosts.spot_notice={metadata.url}")
    with LocalJob(job) as run:
        run.start_hosts("ab")
        run.wait_step(3)
        run.pause_trainer()
        metadata.answer = (200, notice_in(120.0))
        run.wait(lambda status: all(host["state"] == "leaving" for host in status["hosts"]))
        run.resume_trainer()
        assert [leaves(run, host) for host in ("a0", "b1")] == ["preempted", "preempted"]
        first = run.wait(lambda status: status["state"] == "waiting" and not status["hosts"])
        assert "hosts.min=2" in first["message"]
        run.start_host("a again", "a")  # the node is still to be taken away
        assert leaves(run, "a again") == "preempted"
        metadata.answer = (404, b"")
        run.start_host("c", "c")
        run.start_host("d", "d")
        run.wait(lambda status: status["generation"] == 2 and status["state"] == "running")
        run.pause_trainer()
        run.kill_host("d")
        second = run.wait(lambda status: status["state"] == "waiting")
        assert len(run.told("checkpoint_committed")) == 1
        run.drain("c", 60.0)
        assert leaves(run, "c") == "preempted"
        assert [e["step"] for e in run.told("checkpoint_committed")] == [first["step"], second["step"]]
        run.start_host("e", "e")
        run.start_host("f", "f")
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "growth", "growth"])
        assert not run.told("rolled_back")
        generations = run.told("generation_formed")
        assert [g["step"] for g in generations] == [0, first["step"], second["step"]]
        assert [set(g["restored_bytes"]) for g in generations] == [set(), {"object"}, {"object"}]
        assert [event["cause"] for event in run.told("waiting")] == ["preemption", "host_lost"]
        assert [event["node"] for event in run.told("host_left")][2:] == ["a", "c"]
        notices = [(event["node"], event["reason"][:26]) for event in run.told("preemption_notice")]
        assert set(notices) == {(node, "spot notice: terminate at ") for node in "ab"} | {("c", "test")}


def leaves(run: LocalJob, host: str) -> str:
    """The reason that the host gives at its end."""
    process = run.hosts[host]
    assert process.wait(60) == 0
    assert process.stdout is not None
    return process.stdout.read().strip()
