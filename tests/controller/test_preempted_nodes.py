"""Nodes are taken away by appointment: the job goes on without them before they are gone, and loses no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]


def test_drained_nodes_leave_before_the_deadline_and_no_step_is_lost(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    """There are no copies: what the leaving nodes alone have is read from them while they are still there."""
    with LocalJob(make_job(corpus, tmp_path, "drained", "parallel.pp=1", "hosts.max=3", "snapshot.partners=0")) as run:
        run.start_hosts("abc")
        run.wait_step(3)
        for node, host, generation in (("b", "b1", 2), ("c", "c2", 3)):
            run.drain(node, 60.0)
            assert run.hosts[host].wait(60) == 0
            assert run.hosts[host].stdout.read().strip() == "preempted"
            run.wait(lambda status, wanted=generation: status["generation"] == wanted and status["state"] == "running")
        paused = run.status()
        assert run.finish()["state"] == "finished"
        assert [host["node"] for host in paused["hosts"]] == ["a"]
        assert_same_curve(run.lines("steps"), reference)
        assert not run.told("rolled_back")
        assert not run.told("host_lost")
        assert not run.told("trouble")
        formed = run.told("generation_formed")
        assert [(g["cause"], g["layout"]) for g in formed] == [
            ("start", "dp_shard3"),
            ("preemption", "dp_shard2"),
            ("preemption", "single"),
        ]
        assert "node b is being taken away: test" in formed[1]["detail"]
        assert [(e["node"], e["deadline_seconds"]) for e in run.told("preemption_notice")] == [("b", 60.0), ("c", 60.0)]
        assert [event["node"] for event in run.told("host_left")] == ["b", "c"]
        assert all(0 < event["seconds_left"] < 60 for event in run.told("host_left"))
