"""Token shards: Arrow IPC files with a column of unsigned integers in record batches of a fixed size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import File, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


def read_blocks(file: Path) -> Iterator[bytes]:
    """The bytes of a file, 8 MiB at a time."""
    with file.open("rb") as source:
        while block := source.read(BLOCK):
            yield block


def decode_batch(message: bytes, dtype: str) -> np.ndarray[Any, Any]:
    """Tokens (``dtype`` [n]) of one batch from the bytes at an entry of ``Shard.batches``."""
    schema = pa.schema([(COLUMN, pa.from_numpy_dtype(np.dtype(dtype)))])
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
    return _as_numpy(batch.column(0))


def _as_numpy(column: pa.Array) -> np.ndarray[Any, Any]:
    """A view of a column without nulls. pyarrow's own conversion imports pandas: 0.5 s in each new trainer."""
    tokens = np.frombuffer(column.buffers()[1], dtype=str(column.type))
    return tokens[column.offset : column.offset + len(column)]


class MappedShard:
    """A shard file in memory-mapped form: opening reads its footer, slices read what they need."""

    def __init__(self, file: Path, shard: Shard, dtype: str, batch_tokens: int) -> None:
        """Raises :class:`DataError` when the file is not what the manifest says (sizes and types, not contents)."""
        self._batch_tokens = batch_tokens
        try:
            size = file.stat().st_size
            if size != shard.bytes:
                raise DataError(f"shard {file} has {size} bytes, the manifest says {shard.bytes}")
            reader = pa.ipc.open_file(pa.memory_map(str(file)))
        except FileNotFoundError:
            raise DataError(f"shard {file} is missing") from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"shard {file} cannot be read: {error}") from error
        if reader.schema != pa.schema([(COLUMN, pa.from_numpy_dtype(np.dtype(dtype)))]):
            raise DataError(f"shard {file} has other columns than one of {dtype} named {COLUMN!r}")
        if reader.num_record_batches != len(shard.batches):
            raise DataError(
                f"shard {file} has {reader.num_record_batches} batches, the manifest says {len(shard.batches)}"
            )
        self._reader = reader
        self._batches: list[np.ndarray[Any, Any] | None] = [None] * len(shard.batches)

    def copy(self, start: int, out: np.ndarray[Any, Any]) -> None:
        """Fills ``out`` [n] with tokens ``[start, start + n)`` of the shard."""
        done = 0
        while done < len(out):
            number, place = divmod(start + done, self._batch_tokens)
            piece = self._batch(number)[place : place + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def _batch(self, number: int) -> np.ndarray[Any, Any]:
        batch = self._batches[number]
        if batch is None:
            batch = _as_numpy(self._reader.get_batch(number).column(0))
            self._batches[number] = batch
        return batch
