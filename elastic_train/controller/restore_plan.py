"""What every rank of the next generation starts from: one decision for all, then each rank's own directions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory, SnapshotSet
from elastic_train.controller.wire import Message


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The state after ``step``: from ``snapshots`` in memory, the ``checkpoint`` of the same state, or both.

    With neither the job begins.
    With both, what memory does not give is read from the checkpoint: they are of one generation, so of equal bits.
    ``whole``: the snapshots alone suffice. ``images``: of the snapshots, by node and rank.

    A host is told in two parts, so that the decision costs the same for any size of state: ``summary`` goes with the
    assignment, ``directions`` answer the rank once it has said what it needs.
    """

    step: int
    snapshots: SnapshotSet | None
    checkpoint: CheckpointId | None
    whole: bool
    images: Mapping[str, Mapping[int, str]]

    def summary(self, node: str) -> dict[str, Any]:
        """For a trainer on ``node``. ``memory``: directions will follow; ``images``: those on the node."""
        return {
            "step": self.step,
            "whole": self.whole,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.claim,
            "memory": self.snapshots is not None,
            "images": sorted(self.images.get(node, {}).values()),
        }

    def directions(
        self, rank: int, node: str, needs: Description, hosts: Mapping[str, Sequence[HostRecord]], inventory: Inventory
    ) -> list[dict[str, Any]]:
        """For each old rank whose image the new ``rank`` should ask: its description and where the copies are.

        ``hosts``, by node, are those that can serve bytes.
        """
        if self.snapshots is None or (directory := inventory.directories.get(self.snapshots.generation)) is None:
            return []
        snapshots = self.snapshots

        def there(old: int) -> bool:
            return any(place == node or place in hosts for place in snapshots.holders.get(old, ()))

        return [
            {
                "rank": old,
                "description": inventory.descriptions[snapshots.generation, old],
                "copies": list(_copies(snapshots, old, node, hosts)),
            }
            for old in sorted(directory.holders(needs, rank, self.images.get(node, {}), there))
        ]


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
        return _plan(snapshots.step if snapshots else 0, snapshots, None, snapshots is not None)
    saved = None if generation is None else inventory.find(generation, checkpoint.step)
    if snapshots is None or snapshots.step < checkpoint.step:
        return _plan(checkpoint.step, saved, checkpoint, False)
    return _plan(snapshots.step, snapshots, checkpoint if snapshots is saved else None, True)


def _plan(step: int, snapshots: SnapshotSet | None, checkpoint: CheckpointId | None, whole: bool) -> RestorePlan:
    return RestorePlan(step, snapshots, checkpoint, whole, snapshots.images_by_node() if snapshots else {})


def _copies(
    snapshots: SnapshotSet, rank: int, node: str, hosts: Mapping[str, Sequence[HostRecord]]
) -> Iterator[Message]:
    """One per node that holds the image and has a living host; without an address it is on ``node`` itself."""
    for place, held in snapshots.holders[rank].items():
        if place == node:
            yield {"node": place, "image": held.image}
        elif servers := hosts.get(place):
            server = servers[rank % len(servers)]  # spread over the hosts of the node that has it
            yield {"node": place, "image": held.image, "address": list(server.byte_address)}
