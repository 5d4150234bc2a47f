"""A Ray cluster of several nodes on one machine: a head and worker nodes, each a real raylet with its own address.

For the quickstart, tests and benchmarks. Each node is one process tree, so that killing the tree is the death of the
node. Addresses are 127.0.0.2 (head), 127.0.0.3, ...
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 60.0
_TRIES = 3
_STARTED = "Ray runtime started"
"""What ``ray start`` prints once its node has joined."""
_HEAD = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the machine's outside address; the rest of 127.0.0.0/8 it leaves alone."""
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a node whose owner is gone has nobody to wait for
}


class ClusterError(Exception):
    """A node did not come up; the message ends with what it printed."""


@dataclass(slots=True)
class LocalNode:
    """One node. ``process`` is its ``ray start --block``, the root of all its processes."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path
    cpus: int = 0
    """for hosts"""

    def pids(self) -> list[int]:
        """All processes of the node, the root first; empty when it is dead."""
        try:
            root = psutil.Process(self.process.pid)
            return [root.pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL the raylet and every process of the node: what losing the machine looks like."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class LocalCluster:
    """Context manager around a head node with no CPUs for hosts; ``add_nodes`` starts worker nodes.

    Args:
        head: IP address of the head node.
    """

    def __init__(self, *, include_dashboard: bool = False, head: str = _HEAD) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="et-cluster-"))
        self._include_dashboard = include_dashboard
        self._head = head
        self._port = free_port(head)
        self.dashboard_port = free_port(head) if include_dashboard else None
        self.nodes: list[LocalNode] = []
        self._count = 0
        # The kernel ends a node with the thread that started it, so that thread must live as long as the cluster.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-cluster")

    @property
    def address(self) -> str:
        """Address for ``ray.init`` and ``--address``."""
        return f"{self._head}:{self._port}"

    def __enter__(self) -> LocalCluster:
        share_token()
        options = ["--head", f"--port={self._port}", f"--temp-dir={self._folder / 'ray'}", "--num-cpus=0"]
        options += [f"--include-dashboard={str(self._include_dashboard).lower()}"]
        if self.dashboard_port:
            options += [f"--dashboard-host={self._head}", f"--dashboard-port={self.dashboard_port}"]
        try:
            self._join(options)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_nodes(self, count: int, cpus: int) -> list[LocalNode]:
        """Start ``count`` worker nodes with ``cpus`` CPUs each and wait until they have joined."""
        # One after the other: nodes that start at the same moment agree on the same free socket name, and one aborts.
        nodes = [self._join([f"--address={self.address}", f"--num-cpus={cpus}"]) for _ in range(count)]
        for node in nodes:
            node.cpus = cpus
        return nodes

    def kill_node(self, node: LocalNode) -> None:
        self.nodes.remove(node)
        node.kill()

    def node_of(self, pid: int) -> LocalNode | None:
        """The node that a process belongs to."""
        return next((node for node in self.nodes if pid in node.pids()), None)

    def close(self) -> None:
        """Kill all nodes, the head last, and remove their files."""
        for node in reversed(self.nodes):
            node.kill()
        self.nodes = []
        self._starter.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _place(self) -> tuple[str, Sequence[str]]:
        """Where the next worker node is: its IP address, and what goes before its command."""
        return f"127.0.0.{self._count + 2}", ()

    def _start(self, options: list[str]) -> LocalNode:
        head = "--head" in options
        self._count += not head
        address, prefix = (self._head, ()) if head else self._place()
        log = self._folder / f"node-{self._count}.log"
        command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [f"--node-ip-address={address}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        command += ["--dashboard-agent-grpc-port=0", "--metrics-export-port=0", "--runtime-env-agent-port=0"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats", *options]
        with log.open("wb") as output:
            process = self._starter.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the driver; the cluster outlives it until ``close``
                preexec_fn=_end_with_parent,
            ).result()
        return LocalNode(address, process, log)

    def _join(self, options: list[str]) -> LocalNode:
        """Start a node and wait until it has joined. On a busy machine some starts time out inside Ray: tried again."""
        for attempt in range(_TRIES):
            node = self._start(options)
            self.nodes.append(node)
            deadline = time.monotonic() + _START_SECONDS
            while node.process.poll() is None and time.monotonic() < deadline:
                if _STARTED in node.log.read_text():
                    return node
                time.sleep(0.05)
            self.kill_node(node)
            logger.warning("try %d to start the node at %s failed", attempt + 1, node.address)
        raise ClusterError(f"the node at {node.address} did not come up: {node.log.read_text()[-2000:]}")


def _environment() -> dict[str, str]:
    """A node's environment. ``python`` in the entry point of a submitted job is the one that runs us."""
    path = os.pathsep.join(filter(None, (os.path.dirname(sys.executable), os.environ.get("PATH"))))
    return {**os.environ, **_ENVIRONMENT, "PATH": path}


def share_token() -> None:
    """Token authentication with a token that this process and all that it starts have in their environment.

    Set once per process and kept, because Ray caches the first token that it sees. A process that has talked to Ray
    before its first cluster must have called this before that.
    """
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _end_with_parent() -> None:
    """In the child: SIGTERM when our process ends in any way; ``ray start --block`` answers it by ending its node."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port(address: str) -> int:
    """A TCP port that is free on ``address`` at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
