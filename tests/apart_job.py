"""A local job whose coordinator is a process of its own, so that it can be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from elastic_train.config.job import Job
from elastic_train.controller.control_block import ControlBlock
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.pool import machine_wide, sweep
from elastic_train.controller.status import status_of
from tests import warm
from tests.controller.processes import Conversation
from tests.local_job import LocalJob

ENDED = ("finished", "failed", "killed")


def be_coordinator() -> None:
    """The program of the coordinator's process: its order comes as a line of JSON, and every answer is one."""
    asyncio.run(_coordinate(json.loads(sys.stdin.readline())))


async def _coordinate(order: dict[str, Any]) -> None:
    job = Job.model_validate(order.pop("job"), strict=False)
    events: list[dict[str, Any]] = []
    coordinator = Coordinator(job, "127.0.0.1", on_event=events.append, **order)
    await coordinator.start()
    print(json.dumps("listening"), flush=True)
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        if line.strip() == "stop":
            coordinator.stop("test")
        print(json.dumps(status_of(coordinator, events)), flush=True)
    await coordinator.close()


class ApartJob(LocalJob):
    """One run of one job. The coordinator listens on the same port whenever it is started."""

    def __init__(self, job: Job, run_id: str = "run0") -> None:
        self.job, self.run_id = job, run_id
        self.hosts, self.events = {}, []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address: tuple[str, int] = ("127.0.0.1", probe.getsockname()[1])
        self._program: Conversation | None = None

    def __enter__(self) -> ApartJob:
        self.start_coordinator()
        return self

    def launch_coordinator(self) -> None:
        """Start its process and do not wait for it."""
        order = {"job": self.job.as_dict(), "token": self.token, "run_id": self.run_id, "port": self.address[1]}
        self._program = Conversation(warm.start("tests.apart_job:be_coordinator"))
        self._program.tell(json.dumps(order))

    def await_coordinator(self) -> None:
        assert self._program is not None and json.loads(self._program.hear()) == "listening"

    def start_coordinator(self) -> None:
        self.launch_coordinator()
        self.await_coordinator()

    def kill_coordinator(self) -> None:
        """SIGKILL; returns when it is gone."""
        assert self._program is not None
        self._program.kill()
        for pipe in (self._program.process.stdin, self._program.process.stdout):
            assert pipe is not None
            pipe.close()
        self._program = None

    def _order(self, word: str) -> dict[str, Any]:
        assert self._program is not None
        self._program.tell(word)
        return dict(json.loads(self._program.hear()))

    def status(self) -> dict[str, Any]:
        return self._order("status")

    def stop(self) -> None:
        self._order("stop")

    def finish(self, seconds: float = 180.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (status := self.status())["state"] not in ENDED:
            assert time.monotonic() < deadline, f"the job has not ended after {seconds} s: {status}"
            time.sleep(0.02)
        for process in self.hosts.values():
            process.wait(timeout=30)
        return status

    def controls(self) -> list[ControlBlock]:
        """Of the trainers there are: how far they are, without asking a coordinator."""
        return [ControlBlock(str(path)) for path in self.pools_of_run("*.control")]

    def pools_of_run(self, pattern: str) -> list[Path]:
        root = Path(self.job.snapshot.directory)
        return sorted(root.glob(f"elastic_train-{machine_wide(self.job)}-{self.run_id}-*/{pattern}"))

    def await_started(self, step: int, seconds: float = 60.0) -> None:
        """Wait until all trainers have begun ``step``, whoever else lives."""
        controls, deadline = self.controls(), time.monotonic() + seconds
        assert controls
        while (started := [control.started_step for control in controls]) and min(started) < step:
            assert time.monotonic() < deadline, f"trainers are in steps {started}"
            time.sleep(0.001)
        for control in controls:
            control.close()

    def __exit__(self, *exception: object) -> None:
        for process in self.hosts.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if self._program is not None:
            self.kill_coordinator()
        sweep(Path(self.job.snapshot.directory), ended=f"{machine_wide(self.job)}-{self.run_id}")


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def continue_process(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
