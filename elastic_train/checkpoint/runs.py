"""Reading whole objects of a checkpoint: neighbouring chunks with one request, every block checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastic_train.checkpoint.errors import Damage, DamagedChunk
from elastic_train.checkpoint.manifest import ChunkRecord, Manifest
from elastic_train.checkpoint.sources import Bytes, ObjectSource
from elastic_train.checkpoint.verified import read_verified
from elastic_train.storage.store import Store

READ_BYTES = 16 * 2**20
"""Read at once, unless a block is larger: neighbouring chunks together, a large chunk in pieces."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[begin, end)`` of a chunk of tensor ``key``: whole blocks."""

    key: str
    chunk: ChunkRecord
    begin: int
    end: int

    @property
    def place(self) -> tuple[int, int]:
        """Byte range in the object."""
        return self.chunk.byte_offset + self.begin, self.chunk.byte_offset + self.end


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring ``pieces`` of one object, in order; together about ``READ_BYTES`` at most."""

    object: str
    pieces: Sequence[Piece]

    @property
    def begin(self) -> int:
        """First byte in the object."""
        return self.pieces[0].place[0]

    @property
    def end(self) -> int:
        return max(piece.place[1] for piece in self.pieces)


def runs_of(manifest: Manifest, sizes: Mapping[str, int] | None = None) -> list[Run]:
    """All chunks of all objects. ``sizes`` (object -> bytes) leaves out what lies beyond; absent objects have none."""
    step = max(READ_BYTES // manifest.block_bytes, 1) * manifest.block_bytes
    by_object: dict[str, list[Piece]] = {path: [] for path in manifest.objects}
    for key, record in manifest.tensors.items():
        for chunk in record.chunks:
            for begin in range(0, chunk.nbytes, step):
                piece = Piece(key, chunk, begin, min(begin + step, chunk.nbytes))
                if sizes is None or piece.place[1] <= sizes.get(chunk.object, 0):
                    by_object[chunk.object].append(piece)
    return [run for path, pieces in by_object.items() for run in _runs(path, pieces)]


def _runs(path: str, pieces: list[Piece]) -> Iterator[Run]:
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.place):
        if run and piece.place[1] - run[0].place[0] > READ_BYTES:
            yield Run(path, run)
            run = []
        run.append(piece)
    if run:
        yield Run(path, run)


def read_run(store: Store, block_bytes: int, run: Run) -> tuple[Bytes, list[Damage]]:
    """The bytes of ``run``, uint8, and the blocks of it that are damaged: those bytes are not to be used.

    Blocks that are wrong are read again before they count as damaged. Raises SourceError when storage does not answer.
    """
    try:
        data = ObjectSource(store, run.object).read(run.begin, run.end - run.begin)
        missing = False
    except DamagedChunk:  # which of its blocks are there is seen one by one
        data, missing = np.zeros(run.end - run.begin, np.uint8), True
    damages: list[Damage] = []
    for piece in run.pieces:
        first, last = piece.place
        held = data[first - run.begin : last - run.begin]
        if missing or any(piece.chunk.checksums(block_bytes).wrong(piece.begin, held.data)):
            damages += _mend(store, block_bytes, piece, held)
    return data, damages


def _mend(store: Store, block_bytes: int, piece: Piece, held: Bytes) -> list[Damage]:
    """Reads the piece into ``held`` again, block by block: what was spoilt on the way is right then."""
    damages = []
    for begin in range(piece.begin, piece.end, block_bytes):
        end = min(begin + block_bytes, piece.end)
        try:
            block = read_verified(store, piece.key, piece.chunk, block_bytes, begin, end)
        except DamagedChunk as error:
            damages.append(error.damage)
        else:
            held[begin - piece.begin : end - piece.begin] = block
    return damages
