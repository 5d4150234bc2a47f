"""Where a rank's part of a tensor lies in the global tensor. Exact for sizes that divide nothing, and for empty parts.

Tensor parallelism cuts first (one dim into ``tp`` chunks), then sharding cuts dim 0 of what is left into
``dp_shard * cp`` chunks. Both cut as ``torch.chunk`` does: chunks of ``ceil(size / parts)``, the last ones shorter or
empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from elastic_train.config.layout import Coordinates, Layout


@dataclass(frozen=True)
class LocalShard:
    """The live local storage of one rank's part of a global tensor.

    ``tensor``: contiguous, may be empty; writing into it changes the parameter or moment itself.
    ``offsets``: global index of its first element, one per dim; the same on every replica.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a global tensor: first index and extent per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut of a dim into ``parts`` chunks, of which chunk ``index`` is kept."""

    dim: int
    parts: int
    index: int


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of chunk ``index`` of ``size`` elements cut as ``torch.chunk`` cuts, empty chunks at the end."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def local_box(global_shape: tuple[int, ...], cuts: Sequence[Cut]) -> Box:
    """The box that is left after all ``cuts``, made one after the other."""
    offsets, sizes = [0] * len(global_shape), list(global_shape)
    for cut in cuts:
        start, end = chunk_bounds(sizes[cut.dim], cut.parts, cut.index)
        offsets[cut.dim] += start
        sizes[cut.dim] = end - start
    return Box(tuple(offsets), tuple(sizes))


def cuts_of(tensor_dim: int | None, layout: Layout, place: Coordinates, *, sharded: bool) -> list[Cut]:
    """The cuts that a rank at ``place`` makes. ``tensor_dim``: the dim that tensor parallelism cuts, or None."""
    cuts = [] if tensor_dim is None else [Cut(tensor_dim, layout.tp, place.tp)]
    return [*cuts, Cut(0, layout.shards, place.dp_shard * layout.cp + place.cp)] if sharded else cuts


def replicas(cuts: Sequence[Cut], layout: Layout) -> int:
    """How many ranks of one pipeline stage hold the same box of a parameter."""
    return layout.world_size // layout.pp // math.prod(cut.parts for cut in cuts)
