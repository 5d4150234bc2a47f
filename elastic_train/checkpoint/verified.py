"""Reading a committed chunk so that what comes back is what was saved, or an error."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from elastic_train.checkpoint.checksums import Checksums
from elastic_train.checkpoint.errors import Damage, DamagedChunk, SourceError
from elastic_train.checkpoint.manifest import ChunkRecord
from elastic_train.checkpoint.sources import Bytes, ChunkSource, ObjectSource
from elastic_train.storage.store import Store

REREADS = 3
"""A block counts as damaged when the same wrong bytes come this often again. Spoilt on the way, they differ."""
MOST_REREADS = 15
"""Of a block that arrives differently each time, which says nothing about the object."""


@dataclass(frozen=True, slots=True)
class VerifiedChunk:
    """A chunk of tensor ``key`` that begins at ``byte_offset`` of ``source``, which messages call ``name``."""

    source: ChunkSource
    name: str
    key: str
    byte_offset: int
    checksums: Checksums

    def correct(self, held: Bytes, first: int) -> int:
        """Puts right the wrong blocks of ``held``, the chunk's bytes from ``first`` on (whole blocks), in place.

        Each is read again by itself. Returns how many bytes that were. Raises DamagedChunk for a block that is wrong
        in ``source``, SourceError when that cannot be told, and as ``source`` does.
        """
        reread = 0
        for begin, end, expected, actual in self.checksums.wrong(first, held.data):
            seen = Counter([actual])
            while seen[actual] <= REREADS:
                if seen.total() > MOST_REREADS:
                    raise SourceError(
                        f"bytes {self.byte_offset + begin} to {self.byte_offset + end} of {self.name} (tensor "
                        f"{self.key}) arrived {seen.total()} times with wrong xxh3, {len(seen)} different ones"
                    )
                block = self._read(begin, end)
                reread += end - begin
                wrong = next(self.checksums.wrong(begin, block.data), None)
                if wrong is None:
                    held[begin - first : end - first] = block
                    break
                actual = wrong[3]
                seen[actual] += 1
            else:
                raise DamagedChunk(self._damage(begin, end, expected, actual))
        return reread

    def _read(self, begin: int, end: int) -> Bytes:
        try:
            return self.source.read(self.byte_offset + begin, end - begin)
        except DamagedChunk as error:
            raise DamagedChunk(error.damage.of(self.key)) from error

    def _damage(self, begin: int, end: int, expected: str, actual: str) -> Damage:
        place = self.name, self.key, self.byte_offset + begin, end - begin
        return Damage(*place, f"xxh3 {expected}", f"xxh3 {actual}")


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
    try:
        held = source.read(chunk.byte_offset + first, last - first)
    except DamagedChunk as error:
        raise DamagedChunk(error.damage.of(key)) from error
    VerifiedChunk(source, chunk.object, key, chunk.byte_offset, checksums).correct(held, first)
    return held[begin - first : end - first]
