"""A Ray cluster of several nodes on one machine: a head and worker nodes, each a real raylet with its own address.

For the quickstart, tests and benchmarks. Each node is one process tree, so that killing the tree is the death of the
node. Addresses are 127.0.0.2 (head), 127.0.0.3, ...
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from elastic_train.controller.local_node import LocalNode, NodeStarter

logger = logging.getLogger(__name__)

_TRIES = 3
_HEAD = "127.0.0.2"
"""Ray replaces 127.0.0.1 by the machine's outside address; the rest of 127.0.0.0/8 it leaves alone."""

_PORT, _DASHBOARD_PORT = 6379, 8265
"""Free in a network of its own."""


class ClusterError(Exception):
    """A node did not come up; the message ends with what it printed."""


class LocalCluster:
    """Context manager around a head node with no CPUs for hosts; ``add_nodes`` starts worker nodes.

    Args:
        head: IP address of the head node.
        head_command: goes before its command, where it has a network of its own.
    """

    def __init__(self, *, include_dashboard: bool = False, head: str = _HEAD, head_command: Sequence[str] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="et-cluster-"))
        """of all that it writes; its processes name it"""
        self._include_dashboard = include_dashboard
        self._head, self._head_command = head, head_command
        self._port = _PORT if head_command else free_port(head)
        dashboard = _DASHBOARD_PORT if head_command else free_port(head)
        self.dashboard_port = dashboard if include_dashboard else None
        self.nodes: list[LocalNode] = []
        self._count = 0
        self._starter = NodeStarter(self.folder)

    @property
    def address(self) -> str:
        """Address for ``ray.init`` and ``--address``."""
        return f"{self._head}:{self._port}"

    def __enter__(self) -> Self:
        share_token()
        try:
            self._join(self._head_options())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _head_options(self) -> list[str]:
        options = ["--head", f"--port={self._port}", f"--temp-dir={self.folder / 'ray'}", "--num-cpus=0"]
        options += [f"--include-dashboard={str(self._include_dashboard).lower()}"]
        if self.dashboard_port:
            options += [f"--dashboard-host={self._head}", f"--dashboard-port={self.dashboard_port}"]
        return options

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
        self._starter.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _place(self) -> tuple[str, Sequence[str]]:
        """Where the next worker node is: its IP address, and what goes before its command."""
        return f"127.0.0.{self._count + 2}", ()

    def _head_environment(self) -> Mapping[str, str]:
        """Beside that of every node."""
        return {}

    def _start(self, options: list[str]) -> LocalNode:
        if "--head" in options:
            environment = self._head_environment()
            return self._starter.start("head", self._head, options, self._head_command, environment)
        self._count += 1
        address, prefix = self._place()
        return self._starter.start(f"node-{self._count}", address, options, prefix)

    def _join(self, options: list[str]) -> LocalNode:
        """Start a node and wait until it has joined. On a busy machine some starts time out inside Ray: tried again."""
        for attempt in range(_TRIES):
            node = self._start(options)
            self.nodes.append(node)
            if node.joins():
                return node
            self.kill_node(node)
            logger.warning("try %d to start the node at %s failed", attempt + 1, node.address)
        raise ClusterError(f"the node at {node.address} did not come up: {node.log.read_text()[-2000:]}")


def share_token() -> None:
    """Token authentication with a token that this process and all that it starts have in their environment.

    Set once per process and kept, because Ray caches the first token that it sees. A process that has talked to Ray
    before its first cluster must have called this before that.
    """
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def free_port(address: str) -> int:
    """A TCP port that is free on ``address`` at this moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
