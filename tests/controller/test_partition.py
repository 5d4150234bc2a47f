"""Hosts in network namespaces of their own lose their link: for both sides the other one just falls silent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest
from elastic_train.cluster.networks import Network
from elastic_train.controller.forming import Forming
from elastic_train.controller.job_folder import job_store
from elastic_train.controller.trouble import Trouble
from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.ray_job import alive
from tests.recovered import assert_recovered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

LEASE = ("failure.lease_seconds=4", "failure.heartbeat_seconds=0.25", "failure.hang_seconds=600")


def written(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    """Files in the job's checkpoints: size, and when they were written last."""
    found = ((path, path.stat()) for path in (folder / "checkpoints").glob(pattern))
    return {str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) for path, stat in found}


def test_the_cut_off_side_is_dead_before_the_others_go_on_and_comes_back_as_newcomers(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage, a folder of this machine, stays within reach of both sides: nothing but the lease keeps the old one from
    writing to it."""
    cut_off: list[int] = []
    still_alive: dict[str, list[int]] = {}
    form = Forming.form

    def look(self: Forming, cause: Trouble) -> None:
        """Before the others are told to go on."""
        still_alive[cause.kind] = alive(cut_off)
        form(self, cause)

    monkeypatch.setattr(Forming, "form", look)
    job = make_job(corpus, tmp_path, "partition", "parallel.pp=1", "hosts.max=3", *LEASE)
    with Network() as network, LocalJob(job, address=network.address) as run:
        machines = {node: network.add() for node in "abc"}
        for node, machine in machines.items():
            run.start_host(node, node, machine)
        before = run.wait_step(10)
        trainers = {host["node"]: host["trainer_pid"] for host in before["hosts"]}
        os.kill(trainers["a"], signal.SIGSTOP)  # so that no save follows that of step 10
        run.wait(lambda _: bool(run.told("checkpoint_committed")))
        cut_off.append(trainers["c"])
        assert alive(cut_off)
        folder = tmp_path / "partition"
        of_old_side = written(folder, "step-*-g1-*/*")
        assert len(of_old_side) == 3  # one of each rank, that of c among them
        machines["c"].cut()
        os.kill(trainers["a"], signal.SIGCONT)
        run.wait(lambda status: status["generation"] == 2 and status["state"] == "running")
        os.kill(paused := run.trainer_pids()[0], signal.SIGSTOP)  # the few steps would be over before c is back
        machines["c"].reconnect()
        run.wait(lambda status: status["spares"] == 1)
        joined = {event["host"]: event["pid"] for event in run.told("host_joined")}
        gone = run.told("host_silent")[0]
        assert joined[4] == gone["pid"] != os.getpid()  # the same process, which is not taken for the old member
        os.kill(paused, signal.SIGCONT)
        assert run.finish()["state"] == "finished"
        assert still_alive == {"start": [], "host_silent": [], "growth": []}
        assert_recovered(run.lines, reference, ["start", "host_silent", "growth"])
        assert not run.told("rolled_back")
        formed = run.told("generation_formed")
        assert [g["layout"] for g in formed] == ["dp_shard3", "dp_shard2", "dp_shard3"]
        assert formed[1]["step"] >= before["step"]
        assert "is not heard any more" in formed[1]["detail"]
        assert [event["node"] for event in run.told("host_silent")] == ["c"]
        assert not run.told("host_lost")
        saved = [(event["step"], event["generation"]) for event in run.told("checkpoint_committed")]
        assert saved == [(10, 1), (20, 2 if formed[2]["step"] >= 20 else 3), (30, 3)]
        store = job_store(job)
        assert [(step, load_manifest(store, step).generation) for step in list_checkpoints(store)] == saved
        assert written(folder, "step-*-g1-*/*") == of_old_side
        assert len(written(folder, "claim-*.json")) == 1  # that of the only coordinator there was
