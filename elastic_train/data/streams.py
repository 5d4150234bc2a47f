"""Stored files as streams: whole, decompressed, and with random access."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from elastic_train.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from elastic_train.data.corpus import InputFile
    from elastic_train.storage.store import Store

BLOCK = 8 * 2**20
GZIP_BLOCK = 2**20
"""Of compressed bytes that are read at a time."""
TAIL_BLOCK = 2**18
"""Read at a time behind the end of a range, where only the rest of a line is wanted."""


class StoredFile(io.RawIOBase):
    """A stored object with the methods of a binary file, read in ranges."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path
        self._size, self._place = store.size(path), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._size - self._place, 0)
        length = left if size is None or size < 0 else min(size, left)
        data = self._store.read(self._path, self._place, length) if length else b""
        self._place += length
        return data

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


def open_file(store: Store, path: str) -> pa.NativeFile:
    """With random access, for pyarrow."""
    local = store.local_path(path)
    return pa.OSFile(os.fsencode(local)) if local is not None else pa.PythonFile(StoredFile(store, path), mode="r")


def decompressed(store: Store, file: InputFile) -> Iterator[bytes]:
    """The contents of a compressed file in blocks. Raises :class:`DataError` when it is damaged or ends too soon."""
    try:
        with _decompressing(store, file) as stream:
            while block := stream.read(BLOCK):
                yield block
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{file.uri} is damaged, or no {file.compression}: {error}") from None


@contextmanager
def _decompressing(store: Store, file: InputFile) -> Iterator[pa.NativeFile | gzip.GzipFile]:
    """With gzip of the standard library: as all tools, and unlike pyarrow, it takes zero bytes behind the end."""
    if file.compression != "gzip":
        yield pa.CompressedInputStream(open_file(store, file.path), file.compression)
        return
    local = store.local_path(file.path)
    raw = StoredFile(store, file.path) if local is None else local.open("rb", buffering=0)
    with io.BufferedReader(raw, GZIP_BLOCK) as packed, gzip.GzipFile(fileobj=packed, mode="rb") as stream:
        yield stream


def ranged(store: Store, path: str, size: int, begin: int, end: int) -> Iterator[bytes]:
    """Bytes from ``begin`` on in blocks, to ``end`` in large ones and behind it in small ones."""
    while begin < size:
        length = min(BLOCK, end - begin) if begin < end else min(TAIL_BLOCK, size - begin)
        yield store.read(path, begin, length)
        begin += length


def lines(blocks: Iterator[bytes], limit: int, begin: int = 0, end: int = sys.maxsize) -> Iterator[bytes | None]:
    """The lines that begin at bytes [begin, end) of a stream, without their newline; None for one that is longer than
    ``limit`` bytes, of which no more is held.

    What follows the last newline is a line too, unless it is empty. Nothing is read to find the end of a line that is
    not wanted.
    """
    held: list[bytes] = []
    start = size = 0  # of the line that is being read
    for block in blocks:
        *ended, last = block.split(b"\n")
        for piece in ended:
            held.append(piece)
            size += len(piece)
            if start >= begin:
                yield b"".join(held) if size <= limit else None
            start, size = start + size + 1, 0
            held.clear()
            if start >= end:
                return
        held.append(last)
        size += len(last)
        if start < begin or size > limit:
            held.clear()
            if start + size >= end:
                break
    if size and begin <= start < end:
        yield b"".join(held) if size <= limit else None
