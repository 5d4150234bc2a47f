"""Which bytes of a row-major chunk a box of it has: as runs, as one span, and cut into smaller boxes. Plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from elastic_train.checkpoint.description import Chunk


@dataclass(frozen=True, slots=True)
class Piece:
    """A box to copy: from ``source_offsets`` of a saved chunk to ``target_offsets`` of the local shard, in elements."""

    source_offsets: tuple[int, ...]
    target_offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def part(self, dim: int, first: int, count: int) -> Piece:
        """Indices ``[first, first + count)`` of the box along ``dim``."""
        return Piece(
            _moved(self.source_offsets, dim, first),
            _moved(self.target_offsets, dim, first),
            (*self.lengths[:dim], count, *self.lengths[dim + 1 :]),
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """``count`` runs of ``length`` bytes, the first at byte ``begin``, each ``stride`` bytes after the one before."""

    begin: int
    length: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.length * self.count

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.begin + (self.count - 1) * self.stride + self.length


def element_strides(chunk: Chunk) -> tuple[int, ...]:
    """Of a row-major chunk, in elements per dim."""
    return _strides(chunk.sizes)


@lru_cache(maxsize=4096)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def item_size(chunk: Chunk) -> int:
    """Bytes of one element of a chunk that is not empty."""
    return chunk.nbytes // math.prod(chunk.sizes)


def piece_bytes(chunk: Chunk, piece: Piece) -> int:
    """Bytes of the box itself."""
    return math.prod(piece.lengths) * item_size(chunk)


def first_byte(chunk: Chunk, piece: Piece) -> int:
    """Of the box in the chunk."""
    return sum(o * s for o, s in zip(piece.source_offsets, element_strides(chunk), strict=True)) * item_size(chunk)


def span(chunk: Chunk, piece: Piece) -> tuple[int, int]:
    """(begin, end) of the smallest byte range of the chunk that holds the box."""
    first = last = 0
    for offset, length, stride in zip(piece.source_offsets, piece.lengths, element_strides(chunk), strict=True):
        first += offset * stride
        last += (offset + length - 1) * stride
    item = item_size(chunk)
    return first * item, (last + 1) * item


def runs_of(chunk: Chunk, piece: Piece) -> list[Runs]:
    """Exactly the bytes of the box, in the order of its elements, counted from the chunk's first byte."""
    strides = [stride * item_size(chunk) for stride in element_strides(chunk)]
    dim, length = _contiguous(chunk, piece)
    begin = first_byte(chunk, piece)
    if dim == 0:
        return [Runs(begin, length, length, 1)]
    *outer, count = piece.lengths[:dim]
    places = itertools.product(*(range(n) for n in outer))
    starts = (begin + sum(i * s for i, s in zip(place, strides[: dim - 1], strict=True)) for place in places)
    return [Runs(start, length, strides[dim - 1] if count > 1 else length, count) for start in starts]


def _contiguous(chunk: Chunk, piece: Piece) -> tuple[int, int]:
    """(number of outer dims, bytes of a run): inside of the outer dims the box is contiguous in the chunk."""
    dim, length = len(piece.lengths), item_size(chunk)
    whole = True
    while dim and (whole or piece.lengths[dim - 1] == 1):
        dim -= 1
        length *= piece.lengths[dim]
        whole = whole and piece.lengths[dim] == chunk.sizes[dim]
    return dim, length


def without_gaps(chunk: Chunk, piece: Piece, gap: int) -> Iterator[Piece]:
    """The box cut where more than ``gap`` bytes of the chunk lie between its runs; in the order of their bytes."""
    dim = next((d for d, n in enumerate(piece.lengths) if n > 1), None)
    if dim is None:
        yield piece
        return
    row = piece.part(dim, 0, 1)
    begin, end = span(chunk, row)
    # Gaps further inside are not larger: a row ends where its own last run does.
    if element_strides(chunk)[dim] * item_size(chunk) - (end - begin) <= gap:
        yield piece
        return
    for index in range(piece.lengths[dim]):
        yield from without_gaps(chunk, piece.part(dim, index, 1), gap)


def within(chunk: Chunk, piece: Piece, begin: int, end: int) -> Iterator[Piece]:
    """The parts of the box in bytes ``[begin, end)`` of the chunk, in their order; an element is where it begins."""
    first, last = span(chunk, piece)
    if last <= begin or end <= first:
        return
    if begin <= first and last <= end:
        yield piece
        return
    dim = next((d for d, n in enumerate(piece.lengths) if n > 1), None)
    if dim is None:
        if begin <= first:
            yield piece
        return
    row_begin, row_end = span(chunk, piece.part(dim, 0, 1))
    stride, count = element_strides(chunk)[dim] * item_size(chunk), piece.lengths[dim]
    inside = max(0, -(-(begin - first) // stride))  # the first row that does not begin before
    behind = min(count, max(inside, (end - first - (row_end - row_begin)) // stride + 1))  # the first that ends after
    if inside:
        yield from within(chunk, piece.part(dim, inside - 1, 1), begin, end)
    if inside < behind:
        yield piece.part(dim, inside, behind - inside)
    if behind < count:
        yield from within(chunk, piece.part(dim, behind, 1), begin, end)


def no_larger(chunk: Chunk, piece: Piece, nbytes: int, runs: int) -> Iterator[Piece]:
    """The box cut into boxes of at most ``nbytes`` bytes and ``runs`` items of ``runs_of``, as long as it has dims."""
    dim = next((d for d, n in enumerate(piece.lengths) if n > 1), None)
    count = math.prod(piece.lengths[: max(0, _contiguous(chunk, piece)[0] - 1)])
    if dim is None or (piece_bytes(chunk, piece) <= nbytes and count <= runs):
        yield piece
        return
    row = piece.part(dim, 0, 1)
    inner = math.prod(row.lengths[: max(0, _contiguous(chunk, row)[0] - 1)])
    rows = max(1, min(nbytes // piece_bytes(chunk, row), runs // inner))
    for first in range(0, piece.lengths[dim], rows):
        part = piece.part(dim, first, min(rows, piece.lengths[dim] - first))
        yield from [part] if rows > 1 else no_larger(chunk, part, nbytes, runs)


def moved(runs: Runs, offset: int) -> Runs:
    """The same runs ``offset`` bytes further on."""
    return replace(runs, begin=runs.begin + offset)


def _moved(offsets: tuple[int, ...], dim: int, count: int) -> tuple[int, ...]:
    return (*offsets[:dim], offsets[dim] + count, *offsets[dim + 1 :])
