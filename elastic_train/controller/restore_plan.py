"""What every rank of the next generation starts from: one decision for all, then each host's own directions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.controller.inventory import Held, Inventory, SnapshotSet
from elastic_train.controller.members import HostRecord
from elastic_train.controller.wire import Message


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The state after ``step``: from ``snapshots`` in memory, the ``checkpoint`` of the same state, or both.

    With neither the job begins.
    With both, what memory does not give is read from the checkpoint: they are of one generation, so of equal bits.
    ``whole``: the snapshots alone suffice.
    """

    step: int
    snapshots: SnapshotSet | None
    checkpoint: CheckpointId | None
    whole: bool = False

    def directions(self, host: HostRecord, hosts: Iterable[HostRecord], inventory: Inventory) -> dict[str, Any]:
        """The plan as a message for the trainer of ``host``, with all copies; ``hosts`` can serve bytes."""
        plan: dict[str, Any] = {"step": self.step, "ranks": [], "whole": self.whole, "checkpoint": None}
        if self.snapshots is not None:
            plan["generation"] = self.snapshots.generation
            plan["ranks"] = _ranks(self.snapshots, host, list(hosts), inventory)
        if self.checkpoint is not None:
            plan["checkpoint"] = self.checkpoint.claim
        return plan


def plan_restore(
    inventory: Inventory,
    nodes: Collection[str],
    checkpoint: CheckpointId | None,
    generation: int | None = None,
) -> RestorePlan:
    """The newest step that is complete over all tiers, of equal steps the one in memory.

    ``generation``: which one wrote ``checkpoint``, if it was one of this inventory's. Two generations may come to one
    step with other bits (another layout sums in another order), so only images of that one go with the checkpoint.
    """
    snapshots = inventory.newest_complete(nodes)
    if checkpoint is None:
        return RestorePlan(snapshots.step if snapshots else 0, snapshots, None, snapshots is not None)
    saved = None if generation is None else inventory.find(generation, checkpoint.step)
    if snapshots is None or snapshots.step < checkpoint.step:
        return RestorePlan(checkpoint.step, saved, checkpoint)
    return RestorePlan(snapshots.step, snapshots, checkpoint if snapshots is saved else None, True)


def _ranks(
    snapshots: SnapshotSet, host: HostRecord, hosts: Collection[HostRecord], inventory: Inventory
) -> list[dict[str, Any]]:
    """For every old rank that memory still has: its description and where ``host`` finds its images."""
    ranks = []
    for rank in sorted(snapshots.holders):
        description = inventory.descriptions.get((snapshots.generation, rank))
        copies = list(_copies(snapshots.holders[rank], rank, host, hosts))
        if description is not None and copies:
            ranks.append({"rank": rank, "description": description, "copies": copies})
    return ranks


def _copies(
    holders: dict[str, Held], rank: int, host: HostRecord, hosts: Collection[HostRecord]
) -> Iterable[dict[str, Any]]:
    """One per node that holds the image and has a living host; without an address it is on the node of ``host``."""
    for node, held in holders.items():
        servers = [other for other in hosts if other.node == node]
        if node == host.node:
            yield {"node": node, "image": held.image}
        elif servers:
            server = servers[rank % len(servers)]  # spread over the hosts of the node that has it
            yield {"node": node, "image": held.image, "address": list(server.byte_address)}


def local_images(plan: Message) -> set[str]:
    """Names of the images of a plan that are on the node of the host that was given it."""
    return {copy["image"] for entry in plan["ranks"] for copy in entry["copies"] if "address" not in copy}
