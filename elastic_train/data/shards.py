"""Token shards: Arrow IPC files with a column of unsigned integers in record batches of a fixed size."""

from __future__ import annotations

import hashlib
import io
from array import array
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import File, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from elastic_train.storage.store import Store

COLUMN, COUNTS, ENDS = "tokens", "counts", "ends"
NOTHING = np.zeros(0, np.uint8)
BLOCK = 8 * 2**20


class Stretch(NamedTuple):
    """Tokens that follow each other.

    ``tokens``: uint16 or uint32 [n]. ``ends``: offsets behind the last token of each document that ends in it.
    ``counts``: uint8 [n], 1 where the token counts in the loss as a label; of no matter where that is not labelled.
    """

    tokens: np.ndarray[Any, Any]
    ends: Sequence[int]
    counts: np.ndarray[Any, Any] = NOTHING


def write_shard(
    store: Store, path: str, stretches: Iterable[Stretch], dtype: str, batch_tokens: int, labelled: bool = False
) -> Shard:
    """Writes a shard to ``path``, the ends of its documents beside it, and describes both.

    Of what comes only about a batch of ``batch_tokens`` is held in memory, the shard in a temporary file: so it is
    written in one go, however long it takes to come. ``dtype``: uint16 or uint32. Raises :class:`DataError` where there
    is no room for the temporary file.
    """
    kinds = [(COLUMN, np.dtype(dtype))] + [(COUNTS, np.dtype(np.uint8))] * labelled
    schema = pa.schema([(name, pa.from_numpy_dtype(kind)) for name, kind in kinds])
    file, ends = _File(), array("Q")
    tokens = 0

    def noted() -> Iterator[Stretch]:
        nonlocal tokens
        for stretch in stretches:
            ends.extend(tokens + end for end in stretch.ends)
            tokens += len(stretch.tokens)
            yield stretch

    with TemporaryFile() as held:
        for piece in file.pieces(schema, _record_batches(schema, noted(), batch_tokens)):
            _hold(held, piece)
        held.seek(0)
        store.write(path, iter(partial(held.read, BLOCK), b""), size_hint=file.size)
    return Shard(
        path=path,
        tokens=tokens,
        documents=len(ends),
        bytes=file.size,
        sha256=file.digest.hexdigest(),
        batches=tuple(file.batches),
        checksums=tuple(file.checksums),
        ends=_write_ends(store, f"{path.removesuffix('.arrow')}.ends.arrow", np.array(ends, np.uint64)),
    )


def _hold(file: IO[bytes], piece: bytes) -> None:
    try:
        file.write(piece)
        file.flush()
    except OSError as error:
        raise DataError(
            f"a shard of {file.tell()} bytes or more cannot be held in {gettempdir()} ({error.strerror}); "
            "set TMPDIR to a folder with more room"
        ) from None


def store_file(store: Store, path: str, data: bytes) -> File:
    """Writes a file of the data set and describes it."""
    store.write(path, [data], size_hint=len(data))
    return File(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _write_ends(store: Store, path: str, ends: np.ndarray[Any, Any]) -> File:
    schema = pa.schema([(ENDS, pa.uint64())])
    batches = [pa.record_batch([pa.array(ends)], schema=schema)] if len(ends) else []
    return store_file(store, path, b"".join(_File().pieces(schema, batches)))


def _record_batches(schema: pa.Schema, stretches: Iterable[Stretch], rows: int) -> Iterator[pa.RecordBatch]:
    """The stretches' columns in batches of ``rows``; the last one may be shorter."""
    held: list[list[np.ndarray[Any, Any]]] = [[] for _ in schema.names]
    size = 0
    for stretch in stretches:
        for column, values in zip(held, (stretch.tokens, stretch.counts), strict=False):
            column.append(values)
        size += len(stretch.tokens)
        if size >= rows:
            columns = [np.concatenate(column) for column in held]
            whole = size - size % rows
            for begin in range(0, whole, rows):
                yield _record_batch(schema, [column[begin : begin + rows] for column in columns])
            held, size = [[column[whole:]] for column in columns], size - whole
    if size:
        yield _record_batch(schema, [np.concatenate(column) for column in held])


def _record_batch(schema: pa.Schema, columns: Sequence[np.ndarray[Any, Any]]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(column) for column in columns], schema=schema)


@dataclass(slots=True)
class _File:
    """An Arrow IPC file that is made in pieces, and what is known of it: ``batches`` has (offset, bytes) of its record
    batch messages, ``checksums`` their xxh3.
    """

    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    batches: list[tuple[int, int]] = field(default_factory=list)
    checksums: list[str] = field(default_factory=list)

    def pieces(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
        """The file's bytes: a piece for each batch, and the footer."""
        sink = _Sink()
        before = 8 + int(schema.serialize().size)  # in front of the first batch: magic, padding, the schema's message
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
                piece = sink.take()
                self.batches.append((self.size + before, len(piece) - before))
                self.checksums.append(xxhash.xxh3_64_hexdigest(memoryview(piece)[before:]))
                yield self._counted(piece)
                before = 0
        yield self._counted(sink.take())

    def _counted(self, piece: bytes) -> bytes:
        self.size += len(piece)
        self.digest.update(piece)
        return piece


class _Sink(io.RawIOBase):
    """Holds what is written to it until that is taken."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._before = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        size = len(self._held)
        self._held += memoryview(data)
        return len(self._held) - size

    def tell(self) -> int:
        return self._before + len(self._held)

    def take(self) -> bytes:
        taken = bytes(self._held)
        self._before += len(taken)
        self._held.clear()
        return taken
