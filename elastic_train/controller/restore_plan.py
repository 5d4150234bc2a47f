"""What every rank of the next generation starts from: one decision for all, then each host's own directions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.controller.inventory import Inventory, SnapshotSet
from elastic_train.controller.members import HostRecord


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The state after ``step``: from ``snapshots`` in memory, else from the checkpoint of that step, else fresh."""

    step: int
    snapshots: SnapshotSet | None
    checkpoint: CheckpointId | None

    def directions(self, host: HostRecord, hosts: Iterable[HostRecord], inventory: Inventory) -> dict[str, Any]:
        """The plan as a message for the trainer of ``host``; ``hosts`` are those that can serve bytes."""
        if self.snapshots is not None:
            servers = list(hosts)
            parts = [_part(host, rank, servers, self.snapshots, inventory) for rank in range(self.snapshots.world_size)]
            return {"kind": "snapshots", "step": self.step, "parts": parts}
        if self.checkpoint is not None:
            return {"kind": "checkpoint", "step": self.step, "claim": self.checkpoint.claim}
        return {"kind": "fresh", "step": self.step}


def plan_restore(inventory: Inventory, nodes: Collection[str], checkpoint: CheckpointId | None) -> RestorePlan:
    """The newest step that is complete, of equal steps the one in memory."""
    snapshots = inventory.newest_complete(nodes)
    step = checkpoint.step if checkpoint else 0
    if snapshots is not None and snapshots.step >= step:
        return RestorePlan(snapshots.step, snapshots, None)
    return RestorePlan(step, None, checkpoint)


def _part(
    host: HostRecord, rank: int, hosts: Iterable[HostRecord], snapshots: SnapshotSet, inventory: Inventory
) -> dict[str, Any]:
    """Where ``host`` finds the image of an old rank: on its own node, else on a node with a living host."""
    holders = snapshots.holders[rank]
    part: dict[str, Any] = {"description": inventory.descriptions[snapshots.generation, rank]}
    if host.node in holders:
        return part | {"local": True, "image": f"{host.pool}/{holders[host.node].image}"}
    servers = [other for other in hosts if other.node in holders]
    server = servers[rank % len(servers)]  # spread over the hosts of the node that has it
    return part | {"local": False, "image": holders[server.node].image, "address": list(server.byte_address)}
