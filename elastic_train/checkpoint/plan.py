"""Which pieces of which saved chunks a rank needs: torch DCP planning over our descriptions.

Works for any two box partitions of the same tensors, empty shards and sizes that divide nothing among them. The plan
is made from explicit offsets and sizes, never from DTensor placements: their arithmetic is wrong for uneven strided
shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from elastic_train.checkpoint.capture import dtype_name
from elastic_train.checkpoint.description import Box, Chunk, Description, union_volume
from elastic_train.checkpoint.errors import CheckpointError, RestoreError
from elastic_train.checkpoint.spans import Piece
from elastic_train.parallel.shard import LocalShard


class Described(Protocol):
    """Anything with a description; the plan refers to it by its position."""

    @property
    def description(self) -> Description: ...


@dataclass(slots=True)
class Need:
    """A saved chunk of ``key``: its copies as (part, index in that part's description), and what to copy from it."""

    key: str
    copies: list[tuple[int, int]]
    piece: Piece
    error: CheckpointError | None = None
    """Why the copy that was tried last could not be read."""


def plan(
    state: Mapping[str, LocalShard], parts: Sequence[Described], expected_keys: Collection[str] | None
) -> list[Need]:
    """The chunks of ``parts`` that the shards of ``state`` need. Raises a RestoreError that lists all that is wrong."""
    saved = _index(parts)
    problems = _extra_keys(saved, expected_keys)
    needs: list[Need] = []
    for key, shard in state.items():
        if not math.prod(shard.global_shape):
            continue
        copies = saved.get(key)
        if copies is None:
            problems.append(f"{key} is missing from the saved state")
            continue
        mismatch = _mismatch(shard, [parts[p].description.chunks[c] for places in copies.values() for p, c in places])
        if mismatch:
            problems.append(mismatch)
            continue
        offsets, wanted = tuple(shard.offsets), shard.tensor.numel()
        pieces = _pieces(tuple(shard.global_shape), (offsets, tuple(shard.tensor.shape)), tuple(copies))
        needs += [Need(key, places, pieces[box]) for box, places in copies.items() if box in pieces]
        covered = union_volume((piece.target_offsets, piece.lengths) for piece in pieces.values())
        if covered != wanted:
            problems.append(f"{key}: only {covered} of the {wanted} elements at offsets {offsets} are saved")
    if problems:
        raise RestoreError(problems)
    return needs


_Copies = dict[Box, list[tuple[int, int]]]


def _index(parts: Sequence[Described]) -> dict[str, _Copies]:
    """key -> (offsets, sizes) -> where the copies of that chunk are. Empty chunks are left out."""
    saved: dict[str, _Copies] = {}
    for p, part in enumerate(parts):
        for c, chunk in enumerate(part.description.chunks):
            if chunk.nbytes:
                saved.setdefault(chunk.key, {}).setdefault((chunk.offsets, chunk.sizes), []).append((p, c))
    return saved


def _extra_keys(saved: Mapping[str, _Copies], expected: Collection[str] | None) -> list[str]:
    if expected is None:
        return []
    return [f"{key} is in the saved state but not in this job" for key in saved if key not in expected]


def _mismatch(shard: LocalShard, chunks: Sequence[Chunk]) -> str | None:
    wanted = dtype_name(shard.tensor.dtype), tuple(shard.global_shape)
    for chunk in chunks:
        if chunk.dtype != wanted[0]:
            return f"{chunk.key} is saved as {chunk.dtype}; this job has {wanted[0]}"
        if chunk.global_shape != wanted[1]:
            return f"{chunk.key} is saved with shape {chunk.global_shape}; this job has {wanted[1]}"
    return None


@lru_cache(maxsize=4096)
def _pieces(shape: tuple[int, ...], target: Box, saved: tuple[Box, ...]) -> dict[Box, Piece]:
    """What to copy from each of the ``saved`` boxes that overlap ``target``, all in a tensor of ``shape``.

    Cached, because a parameter, its two moments and the same parameter of all other layers have one answer.
    """
    if not math.prod(target[1]):
        return {}
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in saved]
    metadata = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
    local = ChunkStorageMetadata(torch.Size(target[0]), torch.Size(target[1]))
    pieces: dict[Box, Piece] = {}
    for item in create_read_items_for_chunk_list("", metadata, [local]):
        index = item.storage_index.index
        if index is None:
            raise RuntimeError("DCP planned a read without a chunk index")
        # One box of a saved box at most: two boxes overlap in a box.
        pieces[saved[index]] = Piece(tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))
    return pieces
