"""Carries faults out on the nodes of a cluster: for real, by signals, links and drains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.config.faults import Fault, Kind
from elastic_train.controller.network_interface import interface_of
from elastic_train.controller.ray_nodes import drain_node, head_nodes
from elastic_train.controller.victims import Victim

_ANSWER_SECONDS = 20.0
_SILENCING = (Kind.PARTITION, Kind.KILL_NODE)
"""What takes the answer with it: Ray may give the node up before the answer is given up."""


class Saboteur:
    """Actor on one node. Every method returns a sentence when the fault cannot be done, else ""."""

    def ready(self) -> str:
        """Answers as soon as the actor is there."""
        return ""

    def signal(self, pid: int, ancestor: int, number: int) -> str:
        """Send a signal to ``pid`` if it is a descendant of ``ancestor``: a pid may have been given to another."""
        try:
            process = psutil.Process(pid)
            if ancestor not in (parent.pid for parent in process.parents()):
                return f"process {pid} is not one of process {ancestor} any more"
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return f"process {pid} has ended already"
        return ""

    def signal_worker(self, pid: int, number: int) -> str:
        """As ``signal``, for a Ray worker of this node."""
        return self.signal(pid, os.getppid(), number)

    def kill_node(self) -> str:
        """SIGKILL the raylet and every process of this node, us last."""
        raylet = psutil.Process(os.getppid())
        for process in [*raylet.children(recursive=True), raylet]:
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def partition(self, address: str, seconds: float) -> str:
        """Take down the link that has ``address`` for ``seconds``; the way back is a process of its own."""
        device = interface_of(address)
        if device in (None, "lo"):
            return f"{address} is on no link of its own that could be taken down"
        down = subprocess.run(["ip", "link", "set", str(device), "down"], capture_output=True, text=True)
        if down.returncode:
            return f"link {device} cannot be taken down: {down.stderr.strip()}"
        again = f"sleep {seconds:.3f}; ip link set {device} up"
        subprocess.Popen(["sh", "-c", again], start_new_session=True, stdin=subprocess.DEVNULL)
        return ""


class Saboteurs:
    """One per node, started when first needed."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def prepare(self, node: str) -> Any:
        """Start the one of ``node`` if there is none; returns its handle at once."""
        if node not in self._actors:
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors[node] = ray.remote(Saboteur).options(num_cpus=0, scheduling_strategy=here).remote()
            self._actors[node].ready.remote()
        return self._actors[node]

    def finds(self, fault: Fault, victim: Victim) -> bool:
        """Whether a trainer is still there: a status is old by the time it is read, and generations come and go."""
        if fault.kind not in (Kind.KILL_TRAINER, Kind.HANG):
            return True
        call = self.prepare(victim.node).signal.remote(victim.trainer_pid, victim.host_pid, 0)
        try:
            return not ray.get(call, timeout=_ANSWER_SECONDS)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            self._actors.pop(victim.node, None)
            return False

    def strike(self, fault: Fault, victim: Victim) -> str:
        """Do what ``fault`` says to ``victim``; a sentence when it cannot be done, else ""."""
        if fault.kind == Kind.DRAIN:
            return drain_node(victim.node, fault.seconds, "elastic-train chaos drain")
        actor = self.prepare(victim.node)
        if fault.kind == Kind.KILL_TRAINER:
            call = actor.signal.remote(victim.trainer_pid, victim.host_pid, signal.SIGKILL)
        elif fault.kind == Kind.HANG:
            call = actor.signal.remote(victim.trainer_pid, victim.host_pid, signal.SIGSTOP)
        elif fault.kind in (Kind.KILL_HOST, Kind.KILL_COORDINATOR):
            call = actor.signal_worker.remote(victim.host_pid, signal.SIGKILL)
        elif fault.kind == Kind.KILL_NODE:
            call = actor.kill_node.remote()
        else:
            call = actor.partition.remote(victim.address, fault.seconds)
        try:
            return str(ray.get(call, timeout=_ANSWER_SECONDS))
        except ray.exceptions.RayActorError as error:
            del self._actors[victim.node]
            return "" if fault.kind in _SILENCING else f"{victim.label} was lost meanwhile: {_last_line(error)}"
        except ray.exceptions.GetTimeoutError:
            return "" if fault.kind in _SILENCING else f"{victim.label} does not answer"

    def close(self) -> None:
        """End them."""
        for actor in self._actors.values():
            ray.kill(actor)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def nodes_that_must_live() -> set[str]:
    """Ids of the cluster's head and of the node this process is on."""
    return head_nodes() | {ray.get_runtime_context().get_node_id()}
