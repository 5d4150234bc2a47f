"""What differs between two checkpoints, in whatever stores and layouts they are. With numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.description import Box, union_volume
from elastic_train.checkpoint.elements import Difference, difference
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import ChunkRecord, Manifest, TensorRecord
from elastic_train.checkpoint.verified import read_verified
from elastic_train.storage.store import Store

CELL_BYTES = 8 * 2**20
"""Of a tensor, compared at once."""
THREADS = 4
"""Cells at work at once; each holds two cells and what is read for one: some 40 MiB in all."""

DECISIVE = ("step", "cursor", "seed", "data_digest")
"""Beside the tensors and the model, what makes two checkpoints go on differently."""
INCIDENTAL = ("claim", "generation", "created", "config_digest", "block_bytes")

Bits = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint: its manifest and the job folder that it is in."""

    store: Store
    manifest: Manifest


@dataclass(slots=True)
class Comparison:
    """``metadata``: field -> its two values; ``unlike``: tensors that cannot be compared -> what they are.

    ``only``: tensors that one of them has. ``tensors``: those with elements that differ; ``elements``: how many these
    have; ``equal`` counts the others.
    ``read_bytes``: read for all this, from both.
    """

    metadata: dict[str, tuple[object, object]]
    only: tuple[list[str], list[str]]
    unlike: dict[str, tuple[str, str]] = field(default_factory=dict)
    tensors: dict[str, Difference] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    equal: int = 0
    read_bytes: int = 0

    @property
    def same(self) -> bool:
        """Whether training goes on from both in the same way: equal tensors, step, cursor, seed, data and model."""
        return not (self.decisive or any(self.only) or self.unlike or self.tensors)

    @property
    def decisive(self) -> list[str]:
        """Of ``metadata`` what makes them go on differently."""
        return [key for key in self.metadata if key in DECISIVE or key.startswith("model.")]


@dataclass(frozen=True, slots=True)
class _Task:
    """A part of the tensor ``key`` to be read from both sides: ``nbytes`` from each."""

    key: str
    nbytes: int
    read: Callable[[], tuple[Bits, Bits]]


def compare(
    left: Saved,
    right: Saved,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cell_bytes: int = CELL_BYTES,
) -> Comparison:
    """Compares metadata, and tensors bit for bit.

    Where both have a tensor in the same chunks, their checksums tell which blocks are equal, and only the others are
    read. Else a tensor is read in cells of at most ``cell_bytes``, each byte once (and the rest of its checksum's
    block). ``progress`` gets the bytes read so far and in all. Raises DamagedChunk, SourceError.
    """
    ours, theirs = left.manifest.tensors, right.manifest.tensors
    only = [key for key in ours if key not in theirs], [key for key in theirs if key not in ours]
    found = Comparison(_metadata(left.manifest, right.manifest), only)
    tasks: list[_Task] = []
    common = [key for key in ours if key in theirs]
    for key in common:
        kinds = _kind(ours[key]), _kind(theirs[key])
        if kinds[0] != kinds[1]:
            found.unlike[key] = kinds
        else:
            tasks += _tasks(left, right, key, cell_bytes)
    total = 2 * sum(task.nbytes for task in tasks)
    with ThreadPoolExecutor(THREADS) as pool:
        for task, result in zip(tasks, pool.map(partial(_compared, ours), tasks), strict=True):
            found.read_bytes += 2 * task.nbytes
            progress(found.read_bytes, total)
            if result.differing:
                known = found.tensors.get(task.key)
                found.tensors[task.key] = known.joined(result) if known else result
                found.elements[task.key] = math.prod(ours[task.key].shape)
    found.equal = len(common) - len(found.unlike) - len(found.tensors)
    return found


def _compared(records: dict[str, TensorRecord], task: _Task) -> Difference:
    return difference(*task.read(), records[task.key].dtype)


def _metadata(left: Manifest, right: Manifest) -> dict[str, tuple[object, object]]:
    def flat(manifest: Manifest) -> dict[str, object]:
        fields: dict[str, object] = {name: getattr(manifest, name) for name in (*DECISIVE, *INCIDENTAL)}
        for section in ("layout", "metrics", "versions", "model"):
            fields |= {f"{section}.{key}": value for key, value in getattr(manifest, section).items()}
        return fields

    ours, theirs = flat(left), flat(right)
    keys = dict.fromkeys([*ours, *theirs])
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def _kind(record: TensorRecord) -> str:
    """``float32 257 x 12``, and how much of it is saved where that is not all."""
    total = math.prod(record.shape)
    saved = union_volume((chunk.offsets, chunk.sizes) for chunk in record.chunks)
    part = "" if saved == total else f", {saved} of {total} elements saved"
    return f"{record.dtype} {' x '.join(map(str, record.shape)) or 'scalar'}{part}"


def _tasks(left: Saved, right: Saved, key: str, cell_bytes: int) -> Iterator[_Task]:
    ours, theirs = left.manifest.tensors[key], right.manifest.tensors[key]
    item = _item_bytes(key, ours)
    chunks = [{(c.offsets, c.sizes): c for c in record.chunks if c.nbytes} for record in (ours, theirs)]
    block = left.manifest.block_bytes
    if chunks[0].keys() == chunks[1].keys() and block == right.manifest.block_bytes and block % item == 0:
        for box, chunk in chunks[0].items():
            yield from _block_tasks(left, right, key, (chunk, chunks[1][box]), item, cell_bytes)
        return

    def read(box: Box) -> tuple[Bits, Bits]:
        return _cell(left, key, item, box), _cell(right, key, item, box)

    for box in _cells(ours.shape, item, cell_bytes):
        yield _Task(key, item * math.prod(box[1]), partial(read, box))


def _item_bytes(key: str, record: TensorRecord) -> int:
    """Bytes per element."""
    for chunk in record.chunks:
        if elements := math.prod(chunk.sizes):
            size = chunk.nbytes // elements
            if size in (1, 2, 4, 8):
                return size
            raise CheckpointError(f"{key} has {size} bytes per element; 1, 2, 4 and 8 can be compared")
    return 1


def _block_tasks(
    left: Saved, right: Saved, key: str, chunks: tuple[ChunkRecord, ChunkRecord], item: int, cell_bytes: int
) -> Iterator[_Task]:
    """The blocks of a chunk that have different checksums, neighbours together."""
    block, nbytes = left.manifest.block_bytes, chunks[0].nbytes
    unequal = [n for n, (ours, theirs) in enumerate(zip(chunks[0].xxh3, chunks[1].xxh3, strict=True)) if ours != theirs]
    runs: list[tuple[int, int]] = []
    for n in unequal:
        begin, end = n * block, min((n + 1) * block, nbytes)
        if runs and runs[-1][1] == begin and end - runs[-1][0] <= cell_bytes:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))

    def read(begin: int, end: int) -> tuple[Bits, Bits]:
        ours, theirs = (
            read_verified(side.store, key, chunk, block, begin, end).view(f"u{item}")
            for side, chunk in zip((left, right), chunks, strict=True)
        )
        return ours, theirs

    for begin, end in runs:
        yield _Task(key, end - begin, partial(read, begin, end))


def _cells(shape: tuple[int, ...], item: int, cell_bytes: int) -> Iterator[Box]:
    """Boxes of at most ``cell_bytes`` that make up a tensor: single indices, then a range, then whole dims.

    So a cell's part of any chunk is contiguous in that chunk.
    """
    if not math.prod(shape):
        return
    if not shape:
        yield (), ()
        return
    cut = next(dim for dim in range(len(shape)) if item * math.prod(shape[dim + 1 :]) <= cell_bytes)
    length = max(cell_bytes // (item * math.prod(shape[cut + 1 :])), 1)
    rest = shape[cut + 1 :]
    for outer in np.ndindex(*shape[:cut]):
        for begin in range(0, shape[cut], length):
            sizes = (*(1 for _ in outer), min(length, shape[cut] - begin), *rest)
            yield (*outer, begin, *(0 for _ in rest)), sizes


def _cell(side: Saved, key: str, item: int, box: Box) -> Bits:
    """The bits of a cell of tensor ``key``, one unsigned integer per element, in the cell's shape."""
    offsets, sizes = box
    bits: Bits = np.zeros(sizes, f"u{item}")
    for chunk in side.manifest.tensors[key].chunks:
        begin = [max(o, c) for o, c in zip(offsets, chunk.offsets, strict=True)]
        end = [min(o + s, c + n) for o, s, c, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
        if any(b >= e for b, e in zip(begin, end, strict=True)):
            continue
        shape = [e - b for b, e in zip(begin, end, strict=True)]
        first = 0
        for b, c, n in zip(begin, chunk.offsets, chunk.sizes, strict=True):
            first = first * n + b - c
        place = first * item, (first + math.prod(shape)) * item
        data = read_verified(side.store, key, chunk, side.manifest.block_bytes, *place)
        inside = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offsets, strict=True))
        bits[inside] = data.view(f"u{item}").reshape(shape)
    return bits
