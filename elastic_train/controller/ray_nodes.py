"""What Ray says of its nodes, and is told of them, beyond its public API; ``test_ray_contract.py`` guards it.

Without Ray Train, whose imports take a second of a core: the coordinator needs none of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]

HEAD_RESOURCE = "node:__internal_head__"
"""What only a head node has."""
_ASK_SECONDS = 10.0
"""So long may the cluster's control take to answer."""


def drain_node(node_id: str, seconds: float, reason: str) -> str:
    """Announce the end of a node in ``seconds``, as a cloud does before it takes it; a sentence if Ray refuses."""
    return _drain(GcsClient(address=ray.get_runtime_context().gcs_address), node_id, seconds, reason)


def drain_this_machine(address: str, seconds: float, reason: str) -> str:
    """``drain_node`` for the nodes with an address of this machine, from a process that is not connected to Ray.

    Args:
        address: of the cluster; ``auto``: that of a node here.
    """
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        gcs = GcsClient(address=canonicalize_bootstrap_address_or_die(address))
        nodes = gcs.get_all_node_info(timeout=_ASK_SECONDS, state_filter=GcsNodeInfo.GcsNodeState.ALIVE)
        here = [node_id.hex() for node_id, node in nodes.items() if node.node_manager_address in own]
        refusals = [_drain(gcs, node_id, seconds, reason) for node_id in here]
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        return f"the cluster at {address!r} does not answer: {error}"
    return " and ".join(filter(None, refusals)) if here else f"no node of the cluster at {address!r} is on this machine"


def _drain(gcs: GcsClient, node_id: str, seconds: float, reason: str) -> str:
    preempted = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
    deadline = time.time_ns() // 1_000_000 + int(seconds * 1000)
    accepted, refusal = gcs.drain_node(node_id, preempted, reason, deadline)
    return "" if accepted else f"Ray does not drain node {node_id[:8]}: {refusal}"


def draining_nodes() -> dict[str, float | None]:
    """Ids of the nodes that Ray is told will be taken away, with the seconds until then (None: no deadline).

    Waits for the cluster's control, so never to be called on an event loop.
    """
    from ray._private.state import state

    now = time.time()
    return {node: end / 1000 - now if end else None for node, end in state.get_draining_nodes().items()}


def head_nodes() -> set[str]:
    """Ids of the nodes that have the cluster's control."""
    nodes: list[dict[str, Any]] = ray.nodes()
    return {str(node["NodeID"]) for node in nodes if HEAD_RESOURCE in node["Resources"]}


def free_seats(seat: Mapping[str, float]) -> Counter[str]:
    """Node -> how many hosts with resources ``seat`` it has free at this moment, of the nodes that stay."""
    from ray._private.state import available_resources_per_node

    return _seats(seat, available_resources_per_node())


def all_seats(seat: Mapping[str, float]) -> Counter[str]:
    """Node -> how many hosts with resources ``seat`` it has, free or not, of the nodes that stay."""
    from ray._private.state import total_resources_per_node

    return _seats(seat, total_resources_per_node())


def _seats(seat: Mapping[str, float], nodes: Mapping[str, Mapping[str, float]]) -> Counter[str]:
    draining = draining_nodes()
    return Counter(
        {
            node: int(min(resources.get(name, 0.0) // amount for name, amount in seat.items() if amount))
            for node, resources in nodes.items()
            if node not in draining
        }
    )
