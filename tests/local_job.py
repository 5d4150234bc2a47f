"""A coordinator in this process and hosts as plain processes: everything of the controller except Ray.

Hosts get made-up node ids, so one machine plays several nodes; each "node" has its own snapshot pool.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_train.cluster.networks import Machine
from elastic_train.config.job import Job
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.pool import machine_wide, sweep
from elastic_train.controller.rendezvous_client import Rendezvous
from elastic_train.controller.status import status_of
from tests import warm
from tests.warm import WarmProcess

ROOT = Path(__file__).resolve().parent.parent


class WarmRendezvous(Rendezvous):
    """The same program, forked from a process that has torch imported."""

    async def start(self) -> None:
        self._store = warm.start("elastic_train.controller.rendezvous:main", self._address)
        self.endpoint = (self._address, int(await asyncio.to_thread(self._store.stdout.readline)))

    async def close(self) -> None:
        self._store.kill()
        await asyncio.to_thread(self._store.wait)
        self._store.stdin.close()
        self._store.stdout.close()


class LocalJob:
    """One run of one job. Use as a context manager; ``hosts`` maps names to processes."""

    token = "test-token"
    fresh = False
    """whether all hosts are (see ``start_host``), and the rendezvous"""

    def __init__(self, job: Job, run_id: str = "run0", address: str = "127.0.0.1") -> None:
        self.job = job
        self.run_id = run_id
        self._listen = address
        self.hosts: dict[str, subprocess.Popen[str] | WarmProcess] = {}
        self.events: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> LocalJob:
        self._thread.start()
        self.coordinator: Coordinator = self._call(self._make())
        self.address: tuple[str, int] = self._call(self.coordinator.start())
        return self

    async def _make(self) -> Coordinator:
        rendezvous = Rendezvous(self._listen) if self.fresh else WarmRendezvous(self._listen)
        return Coordinator(self.job, self._listen, self.token, self.events.append, rendezvous=rendezvous)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def start_hosts(self, nodes: str) -> None:
        """One host per letter, on the node of that letter, named by letter and position: "aab" is a0, a1 and b2."""
        for index, node in enumerate(nodes):
            self.start_host(f"{node}{index}", node)

    def told(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        return [line for line in self.events if line["event"] == event]

    def start_host(
        self, name: str, node: str, machine: Machine | None = None, fresh: bool = False
    ) -> subprocess.Popen[str] | WarmProcess:
        """Start one and do not wait for it.

        Args:
            machine: of a made-up network; default: this one.
            fresh: an interpreter of its own, whose forkserver has everything to import; on a ``machine`` always.
        """
        settings = {
            "coordinator": list(self.address),
            "token": self.token,
            "run_id": self.run_id,
            "node_id": node,
            "node_address": machine.address if machine else "127.0.0.1",
            "job": self.job.as_dict(),
        }
        fresh = fresh or self.fresh or machine is not None
        process = _begin_fresh(machine) if fresh else warm.start("tests.host_program:warm")
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings))
        process.stdin.close()
        self.hosts[name] = process
        return process

    def status(self) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            return status_of(self.coordinator, self.events)

        return dict(self._call(ask()))

    def wait(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 120.0) -> dict[str, Any]:
        """Poll the status until ``condition``; fails when the job ends or time runs out first."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                raise AssertionError(f"gave up waiting after {seconds} s: {status}; hosts: {self._last_words()}")
            if status["state"] in ("finished", "failed", "killed"):
                raise AssertionError(f"the job ended first: {status}")
            time.sleep(0.02)
        return status

    def _last_words(self) -> dict[str, str]:
        """Why hosts have ended; empty for one that was killed or is there."""
        ended = {name: process for name, process in self.hosts.items() if process.poll() is not None}
        return {name: process.stdout.read().strip() for name, process in ended.items() if process.stdout}

    def wait_step(self, step: int, seconds: float = 120.0) -> dict[str, Any]:
        return self.wait(lambda status: status["step"] >= step, seconds)

    def finish(self, seconds: float = 180.0) -> dict[str, Any]:
        """Wait for the end of the job and of the hosts that are left."""

        async def ended() -> None:
            await asyncio.wait_for(self.coordinator.ended.wait(), seconds)

        try:
            asyncio.run_coroutine_threadsafe(ended(), self._loop).result(seconds + 5)
        except TimeoutError:
            raise AssertionError(f"the job has not ended after {seconds} s: {self.status()}") from None
        for process in self.hosts.values():
            process.wait(timeout=30)
        return self.status()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.coordinator.stop, "test")

    def begin_outage(self, seconds: float) -> str:
        """Of object storage, for the coordinator (which is this process) and the hosts."""

        async def begin() -> str:
            return self.coordinator.begin_outage(seconds)

        return str(self._call(begin()))

    def stand_still(self, seconds: float) -> None:
        """The coordinator does nothing for so long, nor reads what comes."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def drain(self, node: str, seconds: float | None, reason: str = "test") -> None:
        """Tell the coordinator that a node will be taken away."""

        async def drain() -> None:
            self.coordinator.drain(node, seconds, reason)

        self._call(drain())

    def kill_host(self, name: str) -> None:
        self.hosts[name].send_signal(signal.SIGKILL)

    def pause_trainer(self) -> None:
        """Stop one trainer: the tiny steps would be over before anything slow has happened."""
        self._paused = self.trainer_pids()[0]
        os.kill(self._paused, signal.SIGSTOP)

    def resume_trainer(self) -> None:
        os.kill(self._paused, signal.SIGCONT)

    def trainer_pids(self) -> list[int]:
        return [host["trainer_pid"] for host in self.status()["hosts"] if host["trainer_pid"]]

    def __exit__(self, *exception: object) -> None:
        for process in self.hosts.values():
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._call(self.coordinator.close())
        self._call(self._loop.shutdown_default_executor())  # a commit that was under way is made now or never
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        sweep(Path(self.job.snapshot.directory), ended=f"{machine_wide(self.job)}-{self.run_id}")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of steps.jsonl, ledger.jsonl or journal.jsonl."""
        path = Path(self.job.storage.uri) / self.job.name / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def _begin_fresh(machine: Machine | None) -> subprocess.Popen[str]:
    command = [*(machine.command if machine else ()), sys.executable, "-m", "tests.host_program"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def lines_in_peace(job: Job, step: int) -> list[dict[str, Any]]:
    """The lines of ``job``'s steps up to ``step``, done by one host that nothing happens to."""
    with LocalJob(job) as calm:
        calm.start_host("only", "node")
        calm.wait_step(step)
        calm.stop()
        calm.finish()
        return calm.lines("steps")[:step]
