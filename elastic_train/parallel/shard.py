"""Where a rank's part of a tensor lies in the global tensor. Exact for sizes that divide nothing, and for empty parts.

Tensor parallelism cuts first (one dim into ``tp`` chunks), then FSDP cuts dim 0 of what is left into ``dp_shard``
chunks. Both cut as ``torch.chunk`` does: chunks of ``ceil(size / parts)``, the last ones shorter or empty.
"""

from __future__ import annotations

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


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of chunk ``index`` of ``size`` elements cut as ``torch.chunk`` cuts, empty chunks at the end."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def local_box(global_shape: tuple[int, ...], tensor_dim: int | None, layout: Layout, place: Coordinates) -> Box:
    """The box that the rank at ``place`` holds. ``tensor_dim``: the dim that tensor parallelism cuts, or None."""
    offsets = [0] * len(global_shape)
    ends = list(global_shape)
    if tensor_dim is not None:
        offsets[tensor_dim], ends[tensor_dim] = chunk_bounds(global_shape[tensor_dim], layout.tp, place.tp)
    start, end = chunk_bounds(ends[0] - offsets[0], layout.dp_shard, place.dp_shard)
    offsets[0], ends[0] = offsets[0] + start, offsets[0] + end
    return Box(tuple(offsets), tuple(end - offset for offset, end in zip(offsets, ends, strict=True)))


def replicas(tensor_dim: int | None, layout: Layout) -> int:
    """How many ranks hold the same box of a parameter."""
    return layout.dp_replicate * layout.cp * (1 if tensor_dim is not None else layout.tp)
