"""Which node holds which rank's snapshot of which step, and the newest step that can be put together from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from elastic_train.checkpoint.description import Description
from elastic_train.controller.directory import Directory


@dataclass(frozen=True, slots=True)
class Held:
    """One whole image of one rank on one node."""

    node: str
    image: str


@dataclass(slots=True)
class SnapshotSet:
    """All images of one step of one generation."""

    generation: int
    step: int
    world_size: int
    holders: dict[int, dict[str, Held]] = field(default_factory=dict)
    """rank -> node -> image"""
    images: int = 0
    """how many, over all ranks and nodes"""

    def hold(self, rank: int, node: str, image: str) -> None:
        """A whole image of ``rank`` is on ``node``."""
        held = self.holders.setdefault(rank, {})
        self.images += node not in held
        held[node] = Held(node, image)

    def complete(self, nodes: Collection[str]) -> bool:
        """Whether each rank's image is on at least one of ``nodes``."""
        return all(any(node in nodes for node in self.holders.get(rank, ())) for rank in range(self.world_size))

    def copies(self, rank: int) -> int:
        return len(self.holders.get(rank, ()))

    def images_by_node(self) -> dict[str, dict[int, str]]:
        """node -> rank -> name of the image."""
        found: dict[str, dict[int, str]] = {}
        for rank, holders in self.holders.items():
            for node, held in holders.items():
                found.setdefault(node, {})[rank] = held.image
        return found


class Inventory:
    """The coordinator's knowledge of all snapshots in the memory of all nodes."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, int], SnapshotSet] = {}
        self._worlds: dict[int, int] = {}
        self._limits: dict[int, int] = {}
        """generation -> the newest of its steps that may still be used"""
        self.descriptions: dict[tuple[int, int], str] = {}
        """(generation, rank) -> JSON description of the rank's image"""
        self.directories: dict[int, Directory] = {}
        """generation -> who holds what"""
        self.unread: deque[tuple[int, int]] = deque()
        """(generation, rank) of descriptions that are not in their directory yet"""

    def open_generation(self, generation: int, world_size: int) -> None:
        self._worlds[generation] = world_size
        self.directories[generation] = Directory()

    def describe(self, generation: int, rank: int, description: str) -> None:
        """What the rank's images hold, as JSON, to be read before the directory is asked; always the same."""
        if (generation, rank) not in self.descriptions:
            self.descriptions[generation, rank] = description
            self.unread.append((generation, rank))

    def read(self, generation: int, rank: int) -> Description:
        """What the rank has told."""
        directory = self.directories[generation]
        if rank not in directory:
            directory.add(rank, self.descriptions[generation, rank])
        return directory.description(rank)

    def read_next(self) -> int | None:
        """Read one of those that are ``unread``; returns its generation if that is known of all its ranks now."""
        generation, rank = self.unread.popleft()
        if (directory := self.directories.get(generation)) is None:
            return None
        self.read(generation, rank)
        return generation if len(directory) == self._worlds[generation] else None

    def described(self, generation: int) -> dict[int, Description]:
        """rank -> what its images hold, of all ranks of a generation that have told."""
        ranks = (rank for rank in range(self._worlds[generation]) if (generation, rank) in self.descriptions)
        return {rank: self.read(generation, rank) for rank in ranks}

    def add(self, generation: int, rank: int, step: int, node: str, image: str) -> SnapshotSet | None:
        """Record a whole image; None for a generation or step that is unknown or already given up."""
        world = self._worlds.get(generation)
        if world is None or not 0 <= rank < world or step > self._limits.get(generation, step):
            return None
        snapshots = self._sets.setdefault((step, generation), SnapshotSet(generation, step, world))
        snapshots.hold(rank, node, image)
        return snapshots

    def newest_complete(self, nodes: Collection[str]) -> SnapshotSet | None:
        """The newest step of which every rank's image is on one of ``nodes`` (of equal steps the newest generation)."""
        for key in sorted(self._sets, reverse=True):
            snapshots = self._sets[key]
            described = all((snapshots.generation, rank) in self.descriptions for rank in range(snapshots.world_size))
            if described and snapshots.complete(nodes):
                return snapshots
        return None

    def find(self, generation: int, step: int) -> SnapshotSet | None:
        """What there is of that very state, complete or not."""
        return self._sets.get((step, generation))

    def drop(self, generation: int, rank: int, step: int, node: str) -> bool:
        """Forget one image, which could not be read; False when it was not known (any more)."""
        snapshots = self._sets.get((step, generation))
        if snapshots is None or snapshots.holders.get(rank, {}).pop(node, None) is None:
            return False
        snapshots.images -= 1
        return True

    def give_up_after(self, step: int) -> None:
        """The generations there are go on from ``step``: their later images, also those still to be told of, are over.

        Without this a node that comes back would bring steps which the job has rolled back, or never logged.
        """
        for key in [key for key in self._sets if key[0] > step]:
            del self._sets[key]
        for generation in self._worlds:
            self._limits[generation] = min(step, self._limits.get(generation, step))

    def supersede(self, finished: SnapshotSet) -> None:
        """Forget every older image: once a step is finished, the buffers of the steps before it are written over."""
        for key in [key for key in self._sets if key < (finished.step, finished.generation)]:
            del self._sets[key]
        for generation in [g for g in self._worlds if g < finished.generation]:
            self._forget(generation)

    def _forget(self, generation: int) -> None:
        self._limits.pop(generation, None)
        self.directories.pop(generation, None)
        for rank in range(self._worlds.pop(generation)):
            self.descriptions.pop((generation, rank), None)
        for key in [key for key in self._sets if key[1] == generation]:
            del self._sets[key]
