"""One kind of exchange between the ranks of one axis, and what a ring algorithm makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from elastic_train.config.layout import Layout

Axis = Literal["tp", "cp", "pp", "shard", "replicate", "batch", "stage", "world", "host", "ends"]
"""Groups of ranks (``parallel.mesh``): ``shard`` is dp_shard x cp, ``batch`` dp_replicate x dp_shard x cp.
``ends``: the first and the last stage. ``host``: no group, but a rank and its CPU's memory (``parallel.offload``)."""
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "copy"]
Overlap = Literal["nothing", "first forward", "last backward", "backwards", "all passes", "other passes"]
OVERLAPS: dict[Overlap, str] = {
    "nothing": "compute waits for it",
    "first forward": "runs beside the forward pass of the first micro-batch, but for the first unit",
    "last backward": "runs beside the backward pass of the last micro-batch, but for the last unit",
    "backwards": "runs beside the backward passes, but for the last unit of each",
    "all passes": "runs beside forward and backward passes, but for the first unit of each",
    "other passes": "runs beside the passes of other micro-batches",
}


@dataclass(slots=True)  # a search makes many, and frozen ones take three times as long
class Exchange:
    """Exchanges of one kind, of one rank in one step.

    ``payload_bytes``: of one of them, the whole tensor: what an all-gather ends with, what a reduce-scatter, an
    all-reduce or an all-to-all begins with, what is sent. ``sent_bytes``: what the rank sends in all of them together.
    """

    axis: Axis
    what: str
    collective: Collective
    count: int
    payload_bytes: float
    ranks: int
    """of the group"""
    dtype: str
    overlaps: Overlap
    units: int = 1
    """of how many pieces, one after the other, the exchanges of one pass consist"""

    @property
    def sent_bytes(self) -> float:
        return self.count * self.payload_bytes * sent_share(self.collective, self.ranks)


@lru_cache(maxsize=4096)
def group_sizes(layout: Layout) -> dict[Axis, int]:
    """Ranks that exchange along each axis."""
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "shard": layout.shards,
        "replicate": layout.dp_replicate,
        "batch": layout.data_ranks * layout.cp,
        "stage": layout.world_size // layout.pp,
        "world": layout.world_size,
        "host": 2,
        "ends": layout.pp,
    }


def sent_share(collective: Collective, ranks: int) -> float:
    """Of the payload, what a rank sends (and receives): ``(N - 1) / N`` in a ring.

    An all-reduce is a reduce-scatter and an all-gather: twice that (Patarasuk and Yuan, 2009, "Bandwidth optimal
    all-reduce algorithms"; NCCL and gloo do so for large messages).
    """
    if collective in ("send", "copy"):
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def exchange(
    layout: Layout,
    axis: Axis,
    what: str,
    collective: Collective,
    count: int,
    payload_bytes: float,
    dtype: str,
    overlaps: Overlap = "nothing",
    units: int = 1,
) -> Exchange:
    return Exchange(axis, what, collective, count, payload_bytes, group_sizes(layout)[axis], dtype, overlaps, units)


def real(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Those that take place: between more than one rank, with something to send."""
    return [each for each in exchanges if each.ranks > 1 and each.count and each.payload_bytes]
