"""Checksums of saved chunks: one xxh3 per block, so that a reader of a part of a chunk can check what it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash
from typing_extensions import Buffer

BLOCK_BYTES = 2**20
"""Block of the checkpoints that are written; readers go by what the manifest says. The last block is shorter."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """``digests`` (16 hex digits each) of the blocks of ``block_bytes`` bytes of one chunk of ``nbytes`` bytes."""

    block_bytes: int
    nbytes: int
    digests: Sequence[str]

    def widen(self, begin: int, end: int) -> tuple[int, int]:
        """The smallest range of whole blocks that holds the bytes ``[begin, end)`` of the chunk."""
        first = begin // self.block_bytes * self.block_bytes
        return first, min(-(-end // self.block_bytes) * self.block_bytes, self.nbytes)

    def wrong(self, begin: int, data: Buffer) -> Iterator[tuple[int, int, str, str]]:
        """(begin, end, expected, actual) of each block that is not right.

        ``data`` are the chunk's bytes from ``begin``, which must be whole blocks (``widen``).
        """
        view = memoryview(data).cast("B")
        for offset in range(0, len(view), self.block_bytes):
            block = view[offset : offset + self.block_bytes]
            expected = self.digests[(begin + offset) // self.block_bytes]
            actual = xxhash.xxh3_64_hexdigest(block)
            if actual != expected:
                yield begin + offset, begin + offset + len(block), expected, actual


class BlockHasher:
    """Takes the bytes of a chunk in pieces of any sizes, in order, and gives the digests of its blocks."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._digests: list[str] = []
        self._open = xxhash.xxh3_64()
        self._held = 0

    def update(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        while view:
            taken = view[: self._block_bytes - self._held]
            self._open.update(taken)
            self._held += len(taken)
            view = view[len(taken) :]
            if self._held == self._block_bytes:
                self._close()

    def digests(self) -> tuple[str, ...]:
        """Of all that was given; a last block that is not full ends here."""
        if self._held:
            self._close()
        return tuple(self._digests)

    def _close(self) -> None:
        self._digests.append(self._open.hexdigest())
        self._open.reset()
        self._held = 0


def block_count(nbytes: int, block_bytes: int) -> int:
    """Number of blocks of a chunk of ``nbytes`` bytes."""
    return -(-nbytes // block_bytes)
