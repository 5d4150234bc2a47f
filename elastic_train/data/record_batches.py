"""Reading shards: the record batches of their tokens, each fetched by one ranged read, and the ends of documents."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from elastic_train.data.errors import DataError
from elastic_train.data.shards import COLUMN, COUNTS, ENDS
from elastic_train.storage.errors import NotFound, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.data.cache import BatchCache
    from elastic_train.data.manifest import File, Shard
    from elastic_train.storage.store import Store

COPIES = 2
"""A batch is read at most this often: bytes may be spoilt on the way."""


class Batch(NamedTuple):
    """``tokens``: uint16 or uint32 [n]. ``counts``: uint8 [n], 1 where the token counts in the loss as a label, or
    None where all do.
    """

    tokens: np.ndarray[Any, Any]
    counts: np.ndarray[Any, Any] | None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.tokens.nbytes + (0 if self.counts is None else self.counts.nbytes)


def decode_batch(message: bytes, dtype: str, labelled: bool = False) -> Batch:
    """One batch from the bytes at an entry of ``Shard.batches``. Raises DataError for bytes that are none."""
    columns = [(COLUMN, pa.from_numpy_dtype(np.dtype(dtype)))] + [(COUNTS, pa.uint8())] * labelled
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), pa.schema(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"no record batch of {', '.join(name for name, _ in columns)}: {error}") from None
    tokens, *counts = (_as_numpy(column) for column in batch.columns)
    return Batch(tokens, counts[0] if counts else None)


def _as_numpy(column: pa.Array) -> np.ndarray[Any, Any]:
    """A view of a column without nulls. pyarrow's own conversion imports pandas: 0.5 s in each new trainer."""
    values = np.frombuffer(column.buffers()[1], dtype=str(column.type))
    return values[column.offset : column.offset + len(column)]


def is_right(shard: Shard, number: int, message: bytes) -> bool:
    """Whether these are the bytes of a batch, by length and, from format 2 on, by their checksum."""
    if len(message) != shard.batches[number][1]:
        return False
    return not shard.checksums or xxhash.xxh3_64_hexdigest(message) == shard.checksums[number]


def fetch_batch(store: Store, shard: Shard, number: int) -> bytes:
    """The bytes of a batch, read once more if they are not what the manifest says.

    Raises:
        DataError: they are not, again; or the shard is missing or has another size.
        StorageError: the store does not answer.
    """
    offset, size = shard.batches[number]
    name = f"{store.uri}/{shard.path}"
    read: Callable[[str, int, int], bytes] = store.read if shard.checksums else store.read_agreed
    try:
        for _ in range(COPIES):
            message = read(shard.path, offset, size)
            if is_right(shard, number, message):
                return message
    except NotFound:
        raise DataError(f"shard {name} is missing") from None
    except StorageError:
        there = store.size(shard.path)
        if there != shard.bytes:
            raise DataError(f"shard {name} has {there} bytes, the manifest says {shard.bytes}") from None
        raise
    raise DataError(
        f"shard {name} is damaged: batch {number} (bytes {offset} to {offset + size}) was read {COPIES} times, "
        f"xxh3 {xxhash.xxh3_64_hexdigest(message)}, the manifest says {shard.checksums[number]}"
    )


def read_ends(store: Store, shard: Shard, cache: BatchCache | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Offsets behind the last token of each document that ends in a shard, int64, checked against the manifest.

    With a ``cache`` they lie in memory that all processes of the node share. Raises DataError for a file that is
    missing or damaged, or a data set of format 1, which has none.
    """
    if shard.ends is None:
        raise DataError(
            f"{store.uri} is of format 1, which does not say where documents end; prepare it anew, or use "
            "data.packing=stream"
        )
    fetch, check = partial(_fetch_file, store, shard.ends), partial(_is_file, shard.ends)
    data = fetch() if cache is None else cache.mapped(f"{shard.ends.sha256[:32]}-ends", fetch, check)
    return _decode_ends(data, f"{store.uri}/{shard.ends.path}", shard)


def _is_file(file: File, data: bytes | memoryview) -> bool:
    return hashlib.sha256(data).hexdigest() == file.sha256


def _fetch_file(store: Store, file: File) -> bytes:
    try:
        for _ in range(COPIES):
            data = store.read(file.path)
            if _is_file(file, data):
                return data
    except NotFound:
        raise DataError(f"file {store.uri}/{file.path} is missing") from None
    raise DataError(f"file {store.uri}/{file.path} is damaged: its sha256 is not {file.sha256}, as the manifest says")


def _decode_ends(data: bytes | memoryview, name: str, shard: Shard) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        column = pa.ipc.open_file(pa.py_buffer(data)).read_all().column(ENDS)
    except (pa.ArrowException, KeyError) as error:
        raise DataError(f"file {name} cannot be read: {error}") from None
    chunks = [_as_numpy(chunk).view(np.int64) for chunk in column.chunks]
    ends = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.int64), *chunks])
    rising = bool((np.diff(ends) > 0).all()) and (not len(ends) or (ends[0] > 0 and ends[-1] <= shard.tokens))
    if len(ends) != shard.documents or not rising:
        raise DataError(f"file {name} does not hold the rising ends of {shard.documents} documents")
    return ends
