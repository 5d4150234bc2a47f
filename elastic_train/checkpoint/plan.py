"""Which pieces of which saved chunks a rank needs: torch DCP planning over our descriptions.

Works for any two box partitions of the same tensors, empty shards and sizes that divide nothing among them. The plan
is made from explicit offsets and sizes, never from DTensor placements: their arithmetic is wrong for uneven strided
shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from elastic_train.checkpoint.capture import dtype_name, dtype_of
from elastic_train.checkpoint.description import Chunk, Description, union_volume
from elastic_train.checkpoint.errors import CheckpointError, RestoreError
from elastic_train.parallel.shard import LocalShard


class Described(Protocol):
    """Anything with a description; the plan refers to it by its position."""

    @property
    def description(self) -> Description: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A box to copy: from ``source_offsets`` of a saved chunk to ``target_offsets`` of the local shard of ``key``."""

    key: str
    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(slots=True)
class Need:
    """A saved chunk: its copies as (part, index in that part's description), and what to copy from it."""

    copies: list[tuple[int, int]]
    pieces: list[Piece] = field(default_factory=list)
    error: CheckpointError | None = None
    """Why the copy that was tried last could not be read."""


def plan(
    state: Mapping[str, LocalShard],
    parts: Sequence[Described],
    expected_keys: Collection[str] | None,
    ignore: tuple[str, ...],
) -> list[Need]:
    """The chunks of ``parts`` that the shards of ``state`` need. Raises a RestoreError that lists all that is wrong."""
    saved = _index(parts)
    problems = _extra_keys(saved, expected_keys, ignore)
    needs: list[Need] = []
    for key, shard in state.items():
        if not math.prod(shard.global_shape):
            continue
        copies = saved.get(key)
        if copies is None:
            problems.append(f"{key} is missing from the saved state")
            continue
        chunks = [parts[places[0][0]].description.chunks[places[0][1]] for places in copies.values()]
        mismatch = _mismatch(shard, chunks)
        if mismatch:
            problems.append(mismatch)
            continue
        if shard.tensor.numel():
            found, covered = _needs(key, shard, chunks, list(copies.values()))
            needs.extend(found)
            wanted = shard.tensor.numel()
            if covered != wanted:
                place = tuple(shard.offsets)
                problems.append(f"{key}: only {covered} of the {wanted} elements at offsets {place} are saved")
    if problems:
        raise RestoreError(problems)
    return needs


_Copies = dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]]


def _index(parts: Sequence[Described]) -> dict[str, _Copies]:
    """key -> (offsets, sizes) -> where the copies of that chunk are. Empty chunks are left out."""
    saved: dict[str, _Copies] = {}
    for p, part in enumerate(parts):
        for c, chunk in enumerate(part.description.chunks):
            if chunk.nbytes:
                saved.setdefault(chunk.key, {}).setdefault((chunk.offsets, chunk.sizes), []).append((p, c))
    return saved


def _extra_keys(saved: Mapping[str, _Copies], expected: Collection[str] | None, ignore: tuple[str, ...]) -> list[str]:
    if expected is None:
        return []
    extra = [key for key in saved if key not in expected and not key.startswith(ignore)]
    return [f"{key} is in the saved state but not in this job" for key in extra]


def _mismatch(shard: LocalShard, chunks: Sequence[Chunk]) -> str | None:
    wanted = dtype_name(shard.tensor.dtype), tuple(shard.global_shape)
    for chunk in chunks:
        if chunk.dtype != wanted[0]:
            return f"{chunk.key} is saved as {chunk.dtype}; this job has {wanted[0]}"
        if chunk.global_shape != wanted[1]:
            return f"{chunk.key} is saved with shape {chunk.global_shape}; this job has {wanted[1]}"
    return None


def _needs(
    key: str, shard: LocalShard, chunks: Sequence[Chunk], copies: Sequence[list[tuple[int, int]]]
) -> tuple[list[Need], int]:
    """The chunks that overlap the shard, and how many of its elements they cover."""
    metadata = TensorStorageMetadata(
        TensorProperties(dtype=dtype_of(chunks[0].dtype)),
        torch.Size(shard.global_shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks],
    )
    local = ChunkStorageMetadata(torch.Size(shard.offsets), shard.tensor.size())
    needs: dict[int, Need] = {}
    boxes = []
    for item in create_read_items_for_chunk_list(key, metadata, [local]):
        index = item.storage_index.index
        if index is None:
            raise RuntimeError(f"DCP planned a read of {key} without a chunk index")
        piece = Piece(key, tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))
        needs.setdefault(index, Need(copies[index])).pieces.append(piece)
        boxes.append((piece.target_offsets, piece.lengths))
    return list(needs.values()), union_volume(boxes)
