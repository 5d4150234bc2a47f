"""What a snapshot holds and where: one chunk per local shard. Plain Python, so that hosts can read it without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_train.checkpoint.errors import CheckpointError

ALIGNMENT = 64
"""Byte offsets of chunks are multiples of this (a cache line, and more than any dtype needs)."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a region of a tensor, in elements per dim."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of one global tensor, stored contiguously in row-major order.

    ``dtype`` is torch's name without the prefix ("float32"); ``offsets`` and ``sizes`` are in elements per dim of
    ``global_shape``; ``byte_offset`` and ``nbytes`` are the place in the image's data area.
    """

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    byte_offset: int
    nbytes: int

    @property
    def identity(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Equal for the copies of one chunk on several ranks."""
        return self.key, self.offsets, self.sizes


@dataclass(frozen=True, slots=True)
class Description:
    """All chunks of one snapshot, and ``nbytes``, the size of its data area."""

    chunks: tuple[Chunk, ...]
    nbytes: int

    def to_json(self) -> str:
        """Compact text: a list per chunk, in the order of the fields of ``Chunk``."""
        rows = [
            [c.key, c.dtype, list(c.global_shape), list(c.offsets), list(c.sizes), c.byte_offset, c.nbytes]
            for c in self.chunks
        ]
        return json.dumps({"nbytes": self.nbytes, "chunks": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Description:
        """Raises CheckpointError for text that is no description, or has a chunk outside its tensor or image."""
        try:
            value = json.loads(text)
            chunks = tuple(_chunk(row) for row in value["chunks"])
            description = cls(chunks, _count(value["nbytes"]))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"not a snapshot description: {error}") from error
        for chunk in chunks:
            if chunk.byte_offset + chunk.nbytes > description.nbytes:
                raise CheckpointError(f"chunk of {chunk.key} ends behind the {description.nbytes} bytes of its image")
        return description


def _chunk(row: Any) -> Chunk:
    key, dtype, shape, offsets, sizes, byte_offset, nbytes = row
    place = _counts(shape), _counts(offsets), _counts(sizes)
    chunk = Chunk(str(key), str(dtype), *place, _count(byte_offset), _count(nbytes))
    if not len(chunk.global_shape) == len(chunk.offsets) == len(chunk.sizes):
        raise ValueError(f"chunk of {key} has a shape, offsets and sizes of different lengths")
    if any(o + s > g for o, s, g in zip(chunk.offsets, chunk.sizes, chunk.global_shape, strict=True)):
        raise ValueError(f"chunk of {key} lies outside its tensor of shape {chunk.global_shape}")
    return chunk


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} must be an integer of at least 0")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def aligned(offset: int) -> int:
    """The first multiple of ``ALIGNMENT`` at or after ``offset`` (bytes)."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def union_volume(boxes: Iterable[Box]) -> int:
    """Number of elements that lie in at least one of ``boxes`` (all of one tensor; they may overlap).

    The edges of the boxes cut the tensor into a grid whose cells are wholly inside or outside each box.
    """
    unique = set(boxes)
    if not unique:
        return 0
    ndim = len(next(iter(unique))[0])
    if ndim == 0:
        return 1
    if len(unique) == 1:
        return math.prod(next(iter(unique))[1])
    edges = [sorted({edge for begin, size in unique for edge in (begin[d], begin[d] + size[d])}) for d in range(ndim)]
    cells = [{edge: index for index, edge in enumerate(inner)} for inner in edges]
    inside = np.zeros([len(inner) - 1 for inner in edges], dtype=bool)
    for begin, size in unique:
        inside[tuple(slice(cells[d][begin[d]], cells[d][begin[d] + size[d]]) for d in range(ndim))] = True
    volumes: Any = inside
    for d in reversed(range(ndim)):
        volumes = volumes @ np.diff(edges[d])
    return int(volumes)
