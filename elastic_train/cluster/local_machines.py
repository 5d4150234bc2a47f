"""A cloud on this machine, for Ray's autoscaler: each machine that it orders is a raylet, as root in a namespace.

Ray finds it by ``type: external`` and ``module`` in the ``provider`` of a cluster file, and calls it in the
autoscaler's process on the head node.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_NODE_STATUS, TAG_RAY_USER_NODE_TYPE

from elastic_train.cluster.networks import Bridge, Machine
from elastic_train.controller.local_node import LocalNode, NodeStarter

logger = logging.getLogger(__name__)

HEAD_ID = "head"
"""The head's id at this provider; it is started by others (``autoscaled.py``)."""
_NUMBERS = range(3, 255)
"""Last numbers of addresses; 1 and 2 are for heads."""

Tags = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Running:
    node: LocalNode
    machine: Machine | None
    tags: Tags

    def end(self) -> None:
        """As when its power is cut."""
        self.node.kill()
        if self.machine is not None:
            self.machine.remove()


class LocalMachines(NodeProvider):
    """Ray's interface to a cloud. Safe to be called from several threads.

    A machine is there as soon as it is ordered, and is gone once its process is; nothing of it is left then.

    Args:
        provider_config: the cluster file's ``provider``, with ``head`` (host:port of the cluster), ``head_node_type``,
            ``folder`` (for logs), and ``bridge`` (``{name, subnet}`` of an existing bridge; None: all on loopback).
        cluster_name: unused but by Ray.
    """

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._head: str = provider_config["head"]
        self._bridge = Bridge(**provider_config["bridge"]) if provider_config["bridge"] else None
        self._starter = NodeStarter(Path(provider_config["folder"]))
        self._head_tags = {
            TAG_RAY_NODE_KIND: NODE_KIND_HEAD,
            TAG_RAY_USER_NODE_TYPE: provider_config["head_node_type"],
            TAG_RAY_NODE_STATUS: "up-to-date",
        }
        self._running: dict[str, _Running] = {}
        self._lock = threading.RLock()
        # Nodes that start at the same moment agree on the same free socket name, and one aborts.
        self._one_at_a_time = threading.Lock()
        self._ids = itertools.count(1)
        self._numbers = itertools.cycle(_NUMBERS)

    def non_terminated_nodes(self, tag_filters: Tags) -> list[str]:
        with self._lock:
            for node_id in [one for one, running in self._running.items() if running.node.process.poll() is not None]:
                logger.info("machine %s is gone", node_id)
                self._running.pop(node_id).end()
            every = [HEAD_ID, *self._running]
            return [one for one in every if tag_filters.items() <= self.node_tags(one).items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self.non_terminated_nodes({})

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> Tags:
        with self._lock:
            return dict(self._head_tags if node_id == HEAD_ID else self._running[node_id].tags)

    def set_node_tags(self, node_id: str, tags: Tags) -> None:
        with self._lock:
            (self._head_tags if node_id == HEAD_ID else self._running[node_id].tags).update(tags)

    def internal_ip(self, node_id: str) -> str:
        with self._lock:
            return self._head.rpartition(":")[0] if node_id == HEAD_ID else self._running[node_id].node.address

    def external_ip(self, node_id: str) -> str:
        return self.internal_ip(node_id)

    def create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: Tags,
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        """Start ``count`` machines, one after the other, and wait until each has joined the cluster or failed to."""
        options = _options(resources, labels)
        for _ in range(count):
            with self._one_at_a_time:
                node_id, running = self._start(tags, options)
                if not running.node.joins():
                    logger.warning("machine %s did not join: %s", node_id, running.node.log.read_text()[-2000:])
                    self.terminate_node(node_id)

    def _start(self, tags: Tags, options: list[str]) -> tuple[str, _Running]:
        with self._lock:
            node_id = f"{self.cluster_name}-{next(self._ids)}"
            machine, address = self._place()
            # By these Ray knows which of its nodes is on which machine.
            environment = {"RAY_CLOUD_INSTANCE_ID": node_id, "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE]}
            prefix = machine.command if machine else ()
            node = self._starter.start(node_id, address, [f"--address={self._head}", *options], prefix, environment)
            running = self._running[node_id] = _Running(node, machine, dict(tags))
            return node_id, running

    def _place(self) -> tuple[Machine | None, str]:
        if self._bridge is None:
            taken = {running.node.address for running in self._running.values()}
            return None, next(one for one in (f"127.0.0.{number}" for number in self._numbers) if one not in taken)
        taken = {running.machine.address for running in self._running.values() if running.machine}
        number = next(one for one in self._numbers if f"{self._bridge.subnet}.{one}" not in taken)
        machine = self._bridge.add(number)
        return machine, machine.address

    def terminate_node(self, node_id: str) -> None:
        """End it at once, whatever runs there: Ray has drained it before. One that is gone is no error."""
        with self._lock:
            if (running := self._running.pop(node_id, None)) is not None:
                running.end()


def _options(resources: dict[str, float], labels: dict[str, str]) -> list[str]:
    """Of ``ray start``: what such a machine has."""
    rest = dict(resources)
    options = [f"--num-cpus={int(rest.pop('CPU', 0))}", f"--num-gpus={int(rest.pop('GPU', 0))}"]
    if memory := rest.pop("object_store_memory", None):
        options.append(f"--object-store-memory={int(memory)}")
    if rest:
        options.append(f"--resources={json.dumps(rest)}")
    if labels:
        options.append("--labels=" + ",".join(f"{name}={value}" for name, value in labels.items()))
    return options
