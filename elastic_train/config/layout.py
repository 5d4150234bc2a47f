"""The sizes of the five parallel axes and a rank's place in them. Plain Python: every layer may import it."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the device mesh, outermost (slowest varying rank) first."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's index along each axis of a layout."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes; ranks are numbered as ``arange(world).view(pp, dp_replicate, dp_shard, cp, tp)``."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"layout axis {axis}={size!r} must be an integer of at least 1")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples (``dp_replicate * dp_shard``)."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Number of ranks among which sharded state is cut (``dp_shard * cp``)."""
        return self.dp_shard * self.cp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of ``rank`` (0 <= rank < world_size)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside layout {self} with {self.world_size} ranks")
        indices: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**indices)

    def data_rank(self, rank: int) -> int:
        """Index of ``rank`` among the data ranks (0 <= index < data_ranks)."""
        place = self.coordinates(rank)
        return place.dp_replicate * self.dp_shard + place.dp_shard

    def as_dict(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        """Axes larger than one, e.g. ``pp2 x dp_shard2``; ``single`` when there is none."""
        parts = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(parts) or "single"
