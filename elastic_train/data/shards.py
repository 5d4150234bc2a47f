"""Token shards: Arrow IPC files with one column of unsigned integers in record batches of a fixed size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMN = "tokens"
BLOCK = 8 * 2**20


def write_shard(file: Path, name: str, tokens: np.ndarray[Any, Any], documents: int, batch_tokens: int) -> Shard:
    """Writes ``tokens`` (uint16 or uint32 [n]) to ``file`` and describes it under ``name``."""
    schema = pa.schema([(COLUMN, pa.from_numpy_dtype(tokens.dtype))])
    batches: list[tuple[int, int]] = []
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        start = sink.tell()
        for begin in range(0, len(tokens), batch_tokens):
            column = pa.array(tokens[begin : begin + batch_tokens])
            writer.write_batch(pa.record_batch([column], schema=schema))
            if not batches:  # the schema went out in front of the first batch
                start = _first_batch_offset(file, schema)
            batches.append((start, sink.tell() - start))
            start = sink.tell()
    digest = hashlib.sha256()
    size = 0
    for block in read_blocks(file):
        digest.update(block)
        size += len(block)
    return Shard(
        path=name,
        tokens=len(tokens),
        documents=documents,
        bytes=size,
        sha256=digest.hexdigest(),
        batches=tuple(batches),
    )


def _first_batch_offset(file: Path, schema: pa.Schema) -> int:
    """Bytes of an IPC file in front of its first batch: magic, padding and the schema message."""
    return 8 + int(schema.serialize().size)


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
