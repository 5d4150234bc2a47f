"""A job on a Ray cluster whose driver is a process of its own, so that it can be watched, signalled and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_train.config.job import Job
from elastic_train.controller.local_cluster import LocalCluster

DRIVER_PROGRAM = """
import dataclasses, json, sys
from elastic_train.config.job import Job
from elastic_train.controller.ray_connection import JobError
from elastic_train.controller.run import run_job

def tell(**line):
    print(json.dumps(line), flush=True)

order = json.load(sys.stdin)
job = Job.model_validate(order["job"], strict=False)
try:
    outcome = run_job(job, address=order["address"], on_status=lambda status: tell(status=status))
except JobError as error:
    tell(problem=str(error))
    sys.exit(2)
tell(outcome=dataclasses.asdict(outcome))
sys.exit(outcome.exit_code)
"""
ENDED = ("finished", "failed", "killed")


class RayJob:
    """One run of one job. Use as a context manager."""

    def __init__(self, job: Job, address: str) -> None:
        self.job = job
        self.status: dict[str, Any] = {"state": "starting", "step": 0, "hosts": [], "spares": 0, "generation": 0}
        self.problem: str | None = None
        self.outcome: dict[str, Any] | None = None
        self.noise: list[str] = []
        """what the driver's process printed beside our own lines"""
        self._address = address

    def __enter__(self) -> RayJob:
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps({"job": self.job.as_dict(), "address": self._address}))
        self.driver.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self.driver.stdout is not None
        for text in self.driver.stdout:
            try:
                line = json.loads(text)
            except ValueError:
                self.noise.append(text)
                continue
            self.status = line.get("status", self.status)
            self.problem = line.get("problem", self.problem)
            self.outcome = line.get("outcome", self.outcome)

    def __exit__(self, *exception: object) -> None:
        if self.driver.poll() is None:
            self.driver.kill()
        self.driver.wait()
        self._reader.join()

    def wait(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 120.0) -> dict[str, Any]:
        """Watch the status until ``condition``; fails when the job ends or time runs out first."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status):
            assert time.monotonic() < deadline, f"gave up waiting after {seconds} s: {status}{self.noise[-20:]}"
            ended = self.driver.poll() is not None or status["state"] in ENDED
            assert not ended, f"the job ended first: {status}{self.problem}{self.noise[-20:]}"
            time.sleep(0.02)
        return status

    def pause(self, step: int = 1, generation: int = 1, on: Sequence[str] = ()) -> int:
        """Stop a trainer once ``step`` is finished: the tiny steps would be over before anything else happens.

        ``on``: ids of the nodes whose trainers may be stopped (default: any). Returns the pid, for ``resume``.
        """

        def eligible(status: dict[str, Any]) -> list[int]:
            hosts = [host for host in status["hosts"] if host["trainer_pid"] and (not on or host["node"] in on)]
            return [host["trainer_pid"] for host in hosts]

        status = self.wait(
            lambda status: status["step"] >= step and status["generation"] >= generation and bool(eligible(status))
        )
        pid = eligible(status)[0]
        os.kill(pid, signal.SIGSTOP)
        return pid

    def resume(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def finish(self, seconds: float = 180.0) -> dict[str, Any]:
        """Wait until the driver has left; returns the job's outcome."""
        code = self.driver.wait(seconds)
        self._reader.join()
        assert self.outcome is not None, f"exit code {code}: {self.problem}{self.noise}"
        return self.outcome | {"exit_code": code}

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of steps.jsonl, ledger.jsonl or journal.jsonl."""
        path = Path(self.job.storage.uri) / self.job.name / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("ledger") if event["event"] == name]


def pools(job: Job) -> list[Path]:
    """The job's folders in shared memory."""
    return list(Path(job.snapshot.directory).glob(f"elastic_train-{job.name}-*"))


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting after {seconds} s"
        time.sleep(0.05)


def until_none(find: Callable[[], Sequence[object]], seconds: float = 60.0) -> None:
    """Wait until there are none of what ``find`` returns."""
    deadline = time.monotonic() + seconds
    while left := find():
        assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
        time.sleep(0.05)


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run (a zombie does not)."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            continue
    return running


DRAIN_PROGRAM = """
import sys, ray
from elastic_train.controller.ray_nodes import drain_node
ray.init(address=sys.argv[1], log_to_driver=False)
print(drain_node(sys.argv[2], 90.0, "test"))
"""


def drain(cluster: LocalCluster, node: str) -> str:
    """As a cloud does that takes the node with that id in 90 s; what Ray has against it."""
    command = [sys.executable, "-c", DRAIN_PROGRAM, cluster.address, node]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def kill_coordinator(cluster: LocalCluster) -> None:
    """SIGKILL that of the only job there is."""
    (coordinator,) = [line.split() for line in processes(cluster) if ":CoordinatorActor" in line]
    os.kill(int(coordinator[0]), signal.SIGKILL)


def refill(cluster: LocalCluster, nodes: int, cpus: int) -> None:
    """Bring the cluster to ``nodes`` living worker nodes with ``cpus`` each, whatever the test before has left."""
    for node in [node for node in cluster.nodes[1:] if node.cpus != cpus or not alive([node.process.pid])]:
        cluster.kill_node(node)
    for node in cluster.nodes[1 + nodes :]:
        cluster.kill_node(node)
    if missing := nodes + 1 - len(cluster.nodes):
        cluster.add_nodes(missing, cpus)


OURS = ("elastic_train.", "ray::RayTrainWorker", "ray::TrainController", "ray::_JoinerHost", ":CoordinatorActor")
"""In the command lines of the processes of a job."""


def processes(cluster: LocalCluster) -> list[str]:
    """Command lines of the processes that jobs have on the cluster's nodes at this moment."""
    found = []
    for pid in (pid for node in cluster.nodes for pid in node.pids()):
        try:
            line = " ".join(psutil.Process(pid).cmdline())
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if any(name in line for name in OURS):
            found.append(f"{pid} {line.strip()}")
    return found
