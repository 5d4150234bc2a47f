"""Hosts in network namespaces of their own lose their link: for both sides the other one just falls silent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_train.controller.finished_steps import FinishedSteps
from elastic_train.controller.members import Generation
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.networks import Network
from tests.ray_job import alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

LEASE = ("failure.lease_seconds=4", "failure.heartbeat_seconds=0.25", "failure.hang_seconds=600")


def test_the_cut_off_side_is_dead_before_the_others_go_on_and_comes_back_as_newcomers(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off: list[int] = []
    still_alive: dict[int, list[int]] = {}
    first_step = FinishedSteps.first_step

    def look(self: FinishedSteps, generation: Generation) -> None:
        still_alive[generation.number] = alive(cut_off)
        first_step(self, generation)

    monkeypatch.setattr(FinishedSteps, "first_step", look)
    job = make_job(corpus, tmp_path, "partition", "parallel.pp=1", "hosts.max=3", *LEASE)
    with Network() as network, LocalJob(job, address=network.address) as run:
        machines = {node: network.add() for node in "abc"}
        for node, machine in machines.items():
            run.start_host(node, node, machine)
        before = run.wait(lambda status: status["step"] >= 12 and bool(run.told("checkpoint_committed")))
        cut_off += [host["trainer_pid"] for host in run.status()["hosts"] if host["node"] == "c"]
        machines["c"].cut()
        run.wait(lambda status: status["generation"] == 2 and status["state"] == "running")
        os.kill(paused := run.trainer_pids()[0], signal.SIGSTOP)  # the few steps would be over before c is back
        machines["c"].reconnect()
        run.wait(lambda status: status["spares"] == 1)
        joined = {event["host"]: event["pid"] for event in run.told("host_joined")}
        gone = run.told("host_silent")[0]
        assert joined[4] == gone["pid"] != os.getpid()  # the same process, which is not taken for the old member
        os.kill(paused, signal.SIGCONT)
        assert run.finish()["state"] == "finished"
        assert len(cut_off) == 1
        assert still_alive == {1: [], 2: [], 3: []}
        assert_same_curve(run.lines("steps"), reference)
        assert not run.told("rolled_back")
        formed = run.told("generation_formed")
        assert [(g["cause"], g["layout"]) for g in formed] == [
            ("start", "dp_shard3"),
            ("host_silent", "dp_shard2"),
            ("growth", "dp_shard3"),
        ]
        assert formed[1]["step"] >= before["step"]
        assert "is not heard any more" in formed[1]["detail"]
        assert [event["node"] for event in run.told("host_silent")] == ["c"]
        assert not run.told("host_lost")
        saved = [(event["step"], event["generation"]) for event in run.told("checkpoint_committed")]
        assert saved == [(10, 1), (20, 2 if formed[2]["step"] >= 20 else 3), (30, 3)]
