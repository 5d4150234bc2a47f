"""One Ray node on this machine: a process tree that starts with ``ray start --block`` and ends with the process that
started it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 60.0
_STARTED = "Ray runtime started"
"""What ``ray start`` prints once its node has joined."""
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Of the head: a node that is gone is noticed within 3 s. Heads in ``cluster/`` have the same."""
_ENVIRONMENT = {
    **HEALTH_CHECKS,
    "RAY_worker_niceness": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a node whose owner is gone has nobody to wait for
}


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
        for pid in {*self.pids(), *self._session()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _session(self) -> Iterator[int]:
        """The processes of the session that the root leads, or led: they may outlive it, as nobody's children."""
        if self.process.poll() is not None and psutil.pid_exists(self.process.pid):
            return  # the number is another's by now, so nobody has outlived it
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.process.pid:
                    yield pid

    def joins(self) -> bool:
        """Wait until it has joined; False when it has ended, or has not joined for long."""
        deadline = time.monotonic() + _START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            if _STARTED in self.log.read_text():
                return True
            time.sleep(0.05)
        return False


class NodeStarter:
    """Starts nodes that get SIGTERM when this process ends in any way. ``folder``: for what the nodes print."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The kernel ends a node with the thread that started it, so that thread must live as long as the process.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="node-starter")

    def start(
        self,
        name: str,
        address: str,
        options: Sequence[str],
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> LocalNode:
        """A node that has yet to join.

        Args:
            name: of its log.
            address: IP address.
            options: of ``ray start``, beside those of every node.
            prefix: goes before its command.
            environment: beside that of every node.
        """
        log = self._folder / f"{name}.log"
        command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [f"--node-ip-address={address}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        command += ["--dashboard-agent-grpc-port=0", "--metrics-export-port=0", "--runtime-env-agent-port=0"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats", *options]
        with log.open("wb") as output:
            process = self._thread.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment() | dict(environment or {}),
                start_new_session=True,  # Ctrl-C is for the driver; the cluster outlives it until ``close``
                preexec_fn=_end_with_parent,
            ).result()
        return LocalNode(address, process, log)

    def close(self) -> None:
        """The nodes must have ended."""
        self._thread.shutdown()


def _environment() -> dict[str, str]:
    """A node's environment. ``python`` in the entry point of a submitted job is the one that runs us."""
    path = os.pathsep.join(filter(None, (os.path.dirname(sys.executable), os.environ.get("PATH"))))
    return {**os.environ, **_ENVIRONMENT, "PATH": path}


def _end_with_parent() -> None:
    """In the child: SIGTERM when our process ends in any way; ``ray start --block`` answers it by ending its node."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
