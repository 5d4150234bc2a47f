"""Token shards: Arrow IPC files with a column of unsigned integers in record batches of a fixed size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from elastic_train.data.manifest import File, Shard

if TYPE_CHECKING:
    from elastic_train.storage.store import Store

COLUMN, COUNTS, ENDS = "tokens", "counts", "ends"
BLOCK = 8 * 2**20


def write_shard(
    store: Store,
    path: str,
    tokens: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
    batch_tokens: int,
    counts: np.ndarray[Any, Any] | None = None,
) -> Shard:
    """Writes a shard to ``path``, the ends of its documents beside it, and describes both.

    Args:
        tokens: uint16 or uint32 [n]
        ends: uint64 [documents], offsets behind the last token of each document that ends here
        counts: uint8 [n], 1 where the token counts in the loss as a label; None: not labelled
    """
    columns = {COLUMN: tokens} if counts is None else {COLUMN: tokens, COUNTS: counts}
    file, batches = _ipc_file(columns, batch_tokens)
    ends_file, _ = _ipc_file({ENDS: ends}, max(len(ends), 1))
    ends_path = f"{path.removesuffix('.arrow')}.ends.arrow"
    described = store_file(store, ends_path, ends_file)
    written = store_file(store, path, file)
    return Shard(
        path=path,
        tokens=len(tokens),
        documents=len(ends),
        bytes=written.bytes,
        sha256=written.sha256,
        batches=tuple(batches),
        checksums=tuple(xxhash.xxh3_64_hexdigest(file[start : start + size]) for start, size in batches),
        ends=described,
    )


def store_file(store: Store, path: str, data: memoryview | bytes) -> File:
    """Writes a file of the data set and describes it."""
    store.write(path, [data], size_hint=len(data))
    return File(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _ipc_file(columns: dict[str, np.ndarray[Any, Any]], batch_rows: int) -> tuple[memoryview, list[tuple[int, int]]]:
    """An Arrow IPC file of equally long columns, and (offset, bytes) of its record batch messages."""
    schema = pa.schema([(name, pa.from_numpy_dtype(values.dtype)) for name, values in columns.items()])
    rows = len(next(iter(columns.values())))
    batches: list[tuple[int, int]] = []
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for begin in range(0, rows, batch_rows):
            # the schema goes out in front of the first batch: magic, padding and its message
            start = sink.tell() if batches else 8 + int(schema.serialize().size)
            arrays = [pa.array(values[begin : begin + batch_rows]) for values in columns.values()]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            batches.append((start, sink.tell() - start))
    return memoryview(sink.getvalue()), batches
