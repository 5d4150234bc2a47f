"""Reading a committed chunk so that what comes back is what was saved, or an error."""

from __future__ import annotations

from elastic_train.checkpoint.errors import Damage, DamagedChunk
from elastic_train.checkpoint.manifest import ChunkRecord
from elastic_train.checkpoint.sources import Bytes, ObjectSource
from elastic_train.storage.store import Store

REREADS = 3
"""Wrong bytes are read again this often before the object counts as damaged: they may have been spoilt on the way."""


def read_verified(
    store: Store, key: str, chunk: ChunkRecord, block_bytes: int, begin: int = 0, end: int | None = None
) -> Bytes:
    """Bytes ``[begin, end)`` (default: all) of a chunk of tensor ``key``, uint8, from the job folder ``store``.

    Raises DamagedChunk, naming the first block that stays wrong, and SourceError when storage does not answer.
    """
    end = chunk.nbytes if end is None else end
    checksums = chunk.checksums(block_bytes)
    first, last = checksums.widen(begin, end)
    source = ObjectSource(store, chunk.object)
    wrong = None
    for _ in range(1 + REREADS):
        try:
            held = source.read(chunk.byte_offset + first, last - first)
        except DamagedChunk as error:
            raise DamagedChunk(error.damage.of(key)) from error
        wrong = next(checksums.wrong(first, held.data), None)
        if wrong is None:
            return held[begin - first : end - first]
    assert wrong is not None
    at, until, expected, actual = wrong
    place = chunk.object, key, chunk.byte_offset + at, until - at
    raise DamagedChunk(Damage(*place, f"xxh3 {expected}", f"xxh3 {actual}"))
