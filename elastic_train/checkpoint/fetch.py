"""One request to one source: fetches the bytes of several saved chunks, checks them, copies them where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from elastic_train.checkpoint.capture import dtype_of
from elastic_train.checkpoint.checksums import Checksums
from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk
from elastic_train.checkpoint.plan import Need
from elastic_train.checkpoint.sources import Bytes, ChunkSource, ImageSource, ObjectSource, RemoteSource
from elastic_train.checkpoint.spans import (
    Piece,
    Runs,
    element_strides,
    first_byte,
    item_size,
    moved,
    no_larger,
    piece_bytes,
    runs_of,
    span,
    within,
    without_gaps,
)
from elastic_train.checkpoint.verified import VerifiedChunk
from elastic_train.parallel.shard import LocalShard

RUN_BYTES = 8 * 2**20
"""Of one request to a host."""
WINDOW_BYTES = 16 * 2**20
"""Neighbouring reads of an object are joined up to this size, and larger ones of one chunk are cut at whole blocks."""
GAP_BYTES = 64 * 2**10
"""Bytes between two reads that are cheaper to fetch than a second request."""
REQUEST_RANGES = 1024
"""Items of ``Runs`` that are asked of a partner at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Saved chunks and where their bytes are. ``checksums`` (one per chunk) are those of a manifest."""

    description: Description
    source: ChunkSource
    checksums: Sequence[Checksums] | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """``pieces`` of one saved chunk of a part, all within its bytes ``[begin, end)``, counted from the image's first.

    The range is in whole blocks where a manifest has checksums of them. ``runs`` are the bytes of the pieces alone,
    where a partner sends no others; ``nbytes`` is their number.
    """

    need: Need
    part: int
    index: int
    pieces: tuple[Piece, ...]
    begin: int
    end: int
    nbytes: int
    runs: tuple[Runs, ...] = ()


@dataclass(slots=True)
class Fetched:
    """``nbytes`` that came, and the reads that failed, with why."""

    nbytes: int = 0
    failed: list[tuple[Read, CheckpointError]] = field(default_factory=list)


def reads_of(need: Need, part: Part, place: tuple[int, int]) -> list[Read]:
    """What to read of the copy at ``place`` (part, index of the chunk) so that as little as possible moves."""
    chunk = part.description.chunks[place[1]]
    if isinstance(part.source, RemoteSource):
        return [_gathered(need, place, chunk, p) for p in no_larger(chunk, need.piece, RUN_BYTES, REQUEST_RANGES)]
    if isinstance(part.source, ImageSource):
        return [_read(need, place, chunk, [need.piece], *span(chunk, need.piece))]
    checksums = part.checksums[place[1]] if part.checksums is not None else None
    window = max(WINDOW_BYTES // checksums.block_bytes, 1) * checksums.block_bytes if checksums else WINDOW_BYTES
    groups: list[tuple[list[Piece], int, int]] = []
    for piece in _in_windows(chunk, need.piece, window):
        begin, end = span(chunk, piece)
        if checksums is not None:
            begin, end = checksums.widen(begin, end)
        if groups and begin - groups[-1][2] <= GAP_BYTES and begin // window == groups[-1][1] // window:
            pieces, first, _ = groups.pop()
            groups.append(([*pieces, piece], first, end))
        else:
            groups.append(([piece], begin, end))
    return [_read(need, place, chunk, pieces, begin, end) for pieces, begin, end in groups]


def _in_windows(chunk: Chunk, piece: Piece, window: int) -> Iterator[Piece]:
    """The box cut at large gaps and at multiples of ``window`` bytes of the chunk, so that memory stays bounded."""
    for part in without_gaps(chunk, piece, GAP_BYTES):
        begin, end = span(chunk, part)
        for first in range(begin // window * window, end, window):
            yield from within(chunk, part, first, first + window)


def _gathered(need: Need, place: tuple[int, int], chunk: Chunk, piece: Piece) -> Read:
    read = _read(need, place, chunk, [piece], *span(chunk, piece))
    return replace(read, runs=tuple(moved(runs, chunk.byte_offset) for runs in runs_of(chunk, piece)))


def _read(need: Need, place: tuple[int, int], chunk: Chunk, pieces: list[Piece], begin: int, end: int) -> Read:
    nbytes = sum(piece_bytes(chunk, piece) for piece in pieces)
    return Read(need, *place, tuple(pieces), chunk.byte_offset + begin, chunk.byte_offset + end, nbytes)


def requests(parts: Sequence[Part], reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Neighbours of one part together: what is fetched at once."""
    run: list[Read] = []
    nbytes = ranges = 0
    for read in sorted(reads, key=lambda read: (read.part, read.begin)):
        if read.runs:
            joins = nbytes + read.nbytes <= RUN_BYTES and ranges + len(read.runs) <= REQUEST_RANGES
        else:
            joins = bool(run) and read.begin - run[-1].end <= GAP_BYTES and read.end - run[0].begin <= WINDOW_BYTES
        if run and not (joins and run[0].part == read.part):
            yield run
            run, nbytes, ranges = [], 0, 0
        run.append(read)
        nbytes += read.nbytes
        ranges += len(read.runs)
    if run:
        yield run


def fetch(state: Mapping[str, LocalShard], part: Part, run: list[Read]) -> Fetched:
    """Fetches ``run``, all of ``part`` and in the order of their bytes, with one request, and fills the state."""
    try:
        if isinstance(part.source, RemoteSource):
            return _gather(state, part, part.source, run)
        return _read_through(state, part, run)
    except DamagedChunk as error:
        if len(run) == 1:
            return Fetched(0, [(run[0], DamagedChunk(error.damage.of(run[0].need.key)))])
    except CheckpointError as error:
        return Fetched(0, [(read, error) for read in run])
    result = Fetched()
    for read in run:  # one by one, to find which of them it is
        alone = fetch(state, part, [read])
        result.nbytes += alone.nbytes
        result.failed += alone.failed
    return result


def _gather(state: Mapping[str, LocalShard], part: Part, source: RemoteSource, run: list[Read]) -> Fetched:
    data = source.gather([runs for read in run for runs in read.runs])
    targets, values, done = [], [], 0
    for read in run:
        dtype = dtype_of(part.description.chunks[read.index].dtype)
        (piece,) = read.pieces
        targets.append(_target(state[read.need.key], piece))
        values.append(torch.from_numpy(data[done : done + read.nbytes]).view(dtype).view(piece.lengths))
        done += read.nbytes
    _copy(targets, values)
    return Fetched(data.nbytes)


def _read_through(state: Mapping[str, LocalShard], part: Part, run: list[Read]) -> Fetched:
    begin, end = run[0].begin, max(read.end for read in run)
    data = part.source.read(begin, end - begin)
    # Views of an image cost nothing: what is not copied has not moved.
    result = Fetched(sum(read.nbytes for read in run) if isinstance(part.source, ImageSource) else end - begin)
    targets, values = [], []
    for read in run:
        held = data[read.begin - begin : read.end - begin]
        try:
            result.nbytes += _correct(part, read, held)
        except CheckpointError as error:
            result.failed.append((read, error))
            continue
        for piece in read.pieces:
            targets.append(_target(state[read.need.key], piece))
            values.append(_value(part.description.chunks[read.index], read, held, piece))
    _copy(targets, values)
    return result


def _correct(part: Part, read: Read, held: Bytes) -> int:
    """Nothing to do where no checksum is known: images; hosts check their own."""
    if part.checksums is None:
        return 0
    chunk = part.description.chunks[read.index]
    name = part.source.path if isinstance(part.source, ObjectSource) else part.source.kind
    verified = VerifiedChunk(part.source, name, chunk.key, chunk.byte_offset, part.checksums[read.index])
    return verified.correct(held, read.begin - chunk.byte_offset)


def _copy(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, values)


def _target(shard: LocalShard, piece: Piece) -> torch.Tensor:
    target = shard.tensor.detach()
    for dim, (offset, length) in enumerate(zip(piece.target_offsets, piece.lengths, strict=True)):
        if length < target.shape[dim]:
            target = target.narrow(dim, offset, length)
    return target


def _value(chunk: Chunk, read: Read, held: Bytes, piece: Piece) -> torch.Tensor:
    """The piece as a strided view of ``held``, which begins at byte ``read.begin`` of the image."""
    flat = torch.from_numpy(held).view(dtype_of(chunk.dtype))
    first = first_byte(chunk, piece) - (read.begin - chunk.byte_offset)
    return flat.as_strided(piece.lengths, element_strides(chunk), first // item_size(chunk))
