"""Fills a rank's shards from saved parts of any layout: nearest copy first, checked, the next copy on failure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from elastic_train.checkpoint.capture import dtype_of
from elastic_train.checkpoint.checksums import Checksums
from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.checkpoint.errors import CheckpointError, Damage, DamagedChunk, RestoreError
from elastic_train.checkpoint.plan import Need, Piece, plan
from elastic_train.checkpoint.sources import ChunkSource, ImageSource, ObjectSource
from elastic_train.parallel.shard import LocalShard

RUN_BYTES = 8 * 2**20
"""Neighbouring reads are joined up to this size; a single larger chunk is read at once."""
GAP_BYTES = 64 * 2**10
"""Bytes between two reads that are cheaper to fetch than a second request."""


@dataclass(frozen=True, slots=True)
class Part:
    """Saved chunks and where their bytes are. ``checksums`` (one per chunk) are those of a manifest."""

    description: Description
    source: ChunkSource
    checksums: Sequence[Checksums] | None = None


@dataclass(slots=True)
class Restored:
    """What ``restore`` did: bytes read by kind of source, and a sentence for each source that had to be passed over."""

    bytes_read: Counter[str] = field(default_factory=Counter)
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    """One needed chunk of the chosen part: the byte range that holds all its pieces, in whole blocks of a manifest."""

    need: Need
    part: int
    index: int
    begin: int
    end: int


def restore(
    state: Mapping[str, LocalShard],
    parts: Sequence[Part],
    *,
    rank: int = 0,
    expected_keys: Collection[str] | None = None,
    ignore: tuple[str, ...] = (),
    threads: int = 4,
) -> Restored:
    """Copies into the tensors of ``state`` what they need of ``parts``, which must all be of one step.

    Of equally near copies rank r prefers the r-th, so that the ranks do not all read from one host. With
    ``expected_keys`` (all keys of the job, over all pipeline stages) saved keys beyond them are errors, except
    those that start with one of ``ignore``. ``threads`` read from hosts and storage at a time.

    Raises RestoreError (before anything is copied) when keys, dtypes, shapes or regions do not fit; DamagedChunk or
    SourceError when no copy of a needed chunk can be read, and ImageError when an image was overwritten meanwhile: the
    state is then partly overwritten.
    """
    pending = plan(state, parts, expected_keys, ignore)
    result = Restored()
    unusable: set[int] = set()
    spoilt: set[tuple[int, int]] = set()
    while pending:
        reads = _choose(pending, parts, unusable, spoilt, rank)
        pending = []
        for read, error in _execute(state, parts, reads, threads, result):
            read.need.error = error
            pending.append(read.need)
            if isinstance(error, DamagedChunk):
                spoilt.add((read.part, read.index))
            else:
                unusable.add(read.part)
            if str(error) not in result.passed_over:
                result.passed_over.append(str(error))
    for part in parts:
        if isinstance(part.source, ImageSource):
            part.source.check()
    return result


def _choose(
    needs: Sequence[Need], parts: Sequence[Part], unusable: set[int], spoilt: set[tuple[int, int]], rank: int
) -> list[_Read]:
    """The copy to read of each chunk. Chunks with the same equally near copies are dealt out to these in equal runs."""
    groups: dict[tuple[int, ...], list[tuple[Need, list[tuple[int, int]]]]] = {}
    for need in needs:
        copies = [place for place in need.copies if place[0] not in unusable and place not in spoilt]
        if not copies:
            raise need.error or RestoreError([f"no source is left for {need.key}"])
        nearest = min(parts[p].source.distance for p, _ in copies)
        copies = [place for place in copies if parts[place[0]].source.distance == nearest]
        groups.setdefault(tuple(p for p, _ in copies), []).append((need, copies))
    reads = []
    for group in groups.values():
        total = sum(_chunk(parts, copies[0]).nbytes for _, copies in group)
        done = 0
        for need, copies in group:
            p, c = copies[(done * len(copies) // total + rank) % len(copies)]
            chunk = _chunk(parts, (p, c))
            begin, end = _byte_range(chunk, need.pieces)
            if (checksums := parts[p].checksums) is not None:
                begin, end = checksums[c].widen(begin, end)
            reads.append(_Read(need, p, c, chunk.byte_offset + begin, chunk.byte_offset + end))
            done += chunk.nbytes
    return reads


def _chunk(parts: Sequence[Part], place: tuple[int, int]) -> Chunk:
    return parts[place[0]].description.chunks[place[1]]


def _byte_range(chunk: Chunk, pieces: Sequence[Piece]) -> tuple[int, int]:
    """The smallest byte range of a row-major chunk that holds all ``pieces`` of it."""
    item = chunk.nbytes // math.prod(chunk.sizes)
    strides = [math.prod(chunk.sizes[d + 1 :]) for d in range(len(chunk.sizes))]
    begins, ends = [], []
    for piece in pieces:
        first = sum(o * s for o, s in zip(piece.source_offsets, strides, strict=True))
        begins.append(first)
        ends.append(first + sum((n - 1) * s for n, s in zip(piece.lengths, strides, strict=True)) + 1)
    return min(begins) * item, max(ends) * item


def _execute(
    state: Mapping[str, LocalShard], parts: Sequence[Part], reads: Sequence[_Read], threads: int, result: Restored
) -> list[tuple[_Read, CheckpointError]]:
    """Does the reads and copies; returns those that failed. Images are read here, the rest in a few threads."""
    failed: list[tuple[_Read, CheckpointError]] = []
    runs = list(_runs(parts, reads))
    near = [run for run in runs if isinstance(parts[run[0].part].source, ImageSource)]
    far = [run for run in runs if not isinstance(parts[run[0].part].source, ImageSource)]
    lost: dict[int, CheckpointError] = {}

    def do(run: list[_Read]) -> list[tuple[_Read, CheckpointError]]:
        part = run[0].part
        if part in lost:  # each further request to a host that is gone would take its whole timeout
            return [(read, lost[part]) for read in run]
        outcome = _do_run(state, parts[part], run)
        for _, error in outcome:
            if not isinstance(error, DamagedChunk):
                lost[part] = error
        return outcome

    with ThreadPoolExecutor(max(1, min(threads, len(far)))) as pool:
        outcomes = pool.map(do, far)
        for run in near:
            failed += do(run)
        for outcome in outcomes:
            failed += outcome
    unread = {id(read) for read, _ in failed}
    for read in reads:
        if id(read) not in unread:
            result.bytes_read[parts[read.part].source.kind] += read.end - read.begin
    return failed


def _runs(parts: Sequence[Part], reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Neighbours of one part together, up to ``RUN_BYTES``. Views of an image cost nothing, so they need no joining."""
    run: list[_Read] = []
    for read in sorted(reads, key=lambda read: (read.part, read.begin)):
        joins = (
            run
            and run[0].part == read.part
            and read.begin - run[-1].end <= GAP_BYTES
            and read.end - run[0].begin <= RUN_BYTES
        )
        if run and not joins:
            yield run
            run = []
        run.append(read)
    if run:
        yield run


def _do_run(state: Mapping[str, LocalShard], part: Part, run: list[_Read]) -> list[tuple[_Read, CheckpointError]]:
    """Fetches the bytes of ``run`` at once and copies its pieces; returns the reads that failed and why."""
    begin, end = run[0].begin, max(read.end for read in run)
    try:
        data = part.source.read(begin, end - begin)
    except DamagedChunk as error:
        if len(run) > 1:  # one by one, to find which chunks it is
            return [failure for read in run for failure in _do_run(state, part, [read])]
        chunk = part.description.chunks[run[0].index]
        return [(run[0], DamagedChunk(error.damage.of(chunk.key)))]
    except CheckpointError as error:
        return [(read, error) for read in run]
    failed: list[tuple[_Read, CheckpointError]] = []
    targets, values = [], []
    for read in run:
        held = data[read.begin - begin : read.end - begin]
        damage = _damage(part, read, held)
        if damage is not None:
            failed.append((read, DamagedChunk(damage)))
            continue
        for piece in read.need.pieces:
            targets.append(_target(state[read.need.key], piece))
            values.append(_value(part.description.chunks[read.index], read, held, piece))
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, values)
    return failed


def _damage(part: Part, read: _Read, held: npt.NDArray[np.uint8]) -> Damage | None:
    """None when the bytes have the checksum of the manifest, or none is known (images; hosts check their own)."""
    if part.checksums is None:
        return None
    chunk = part.description.chunks[read.index]
    wrong = next(part.checksums[read.index].wrong(read.begin - chunk.byte_offset, held.data), None)
    if wrong is None:
        return None
    begin, end, expected, actual = wrong
    name = part.source.path if isinstance(part.source, ObjectSource) else part.source.kind
    return Damage(name, chunk.key, chunk.byte_offset + begin, end - begin, f"xxh3 {expected}", f"xxh3 {actual}")


def _target(shard: LocalShard, piece: Piece) -> torch.Tensor:
    target = shard.tensor.detach()
    for dim, (offset, length) in enumerate(zip(piece.target_offsets, piece.lengths, strict=True)):
        target = target.narrow(dim, offset, length)
    return target


def _value(chunk: Chunk, read: _Read, held: npt.NDArray[np.uint8], piece: Piece) -> torch.Tensor:
    """The piece as a strided view of ``held``, which begins at byte ``read.begin`` of the image."""
    flat = torch.from_numpy(held).view(dtype_of(chunk.dtype))
    strides = [math.prod(chunk.sizes[d + 1 :]) for d in range(len(chunk.sizes))]
    first = sum(o * s for o, s in zip(piece.source_offsets, strides, strict=True))
    skipped = (read.begin - chunk.byte_offset) // flat.element_size()
    return flat.as_strided(piece.lengths, strides, first - skipped)
