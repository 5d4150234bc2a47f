"""First look at a part of the input: what its documents hash to, and which cannot be used."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from elastic_train.data.documents import Found, read_slice
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_train.data.corpus import Corpus
    from elastic_train.data.parts import Part

KINDS = ("", "empty", "not_utf8", "too_long", "duplicate")
"""Why a document is left out, by number; 0: it is not."""
_SCHEMA = pa.schema(
    [("slice", pa.int32()), ("place", pa.int64()), ("hash", pa.binary(16)), ("bytes", pa.int64()), ("kind", pa.uint8()),
     ("reason", pa.string()), ("sample", pa.large_string())]
)  # fmt: skip
_HASH = np.dtype([("high", ">u8"), ("low", ">u8")])


@dataclass(frozen=True, slots=True)
class Judged:
    """A document of a part: number of its slice, where it is in it, its UTF-8, and why it is left out, if it is."""

    slice: int
    found: Found
    data: bytes
    kind: int
    reason: str


def judged(corpus: Corpus, part: Part, max_characters: int | None) -> Iterator[Judged]:
    """Every document of a part, in order."""
    stores = {uri: Store.open(uri, corpus.storage) for uri in {piece.file.store for piece in part}}
    for number, piece in enumerate(part):
        for found in read_slice(corpus, stores[piece.file.store], piece, max_characters):
            yield _judge(number, found, max_characters)


def _judge(number: int, found: Found, max_characters: int | None) -> Judged:
    if found.text is None:
        return Judged(number, found, b"", KINDS.index(found.kind), found.problem)
    if not found.text.strip():
        return Judged(number, found, b"", KINDS.index("empty"), "empty")
    if max_characters is not None and len(found.text) > max_characters:
        reason = f"longer than {max_characters} characters ({len(found.text)})"
        return Judged(number, found, b"", KINDS.index("too_long"), reason)
    try:
        return Judged(number, found, found.text.encode(), 0, "")
    except UnicodeEncodeError as error:  # JSON can spell it
        reason = f"not UTF-8 (character {error.start} is half of a surrogate pair)"
        return Judged(number, found, b"", KINDS.index("not_utf8"), reason)


class PartDigest:
    """sha256 over everything that was read of a part, to notice files that change between two looks."""

    def __init__(self, part: Part) -> None:
        self._part, self._digest = part, hashlib.sha256()

    def add(self, document: Judged) -> None:
        name = f"{self._part[document.slice].file.name}:{document.found.place}".encode("utf-8", "surrogateescape")
        self._digest.update(b"%d %d %d " % (document.kind, len(name), len(document.data)) + name)
        self._digest.update(document.data)
        self._digest.update(repr(document.found.spans).encode())

    def hex(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Looks at one part."""

    corpus: Corpus
    parts: tuple[Part, ...]
    max_characters: int | None

    def __call__(self, order: dict[str, Any], advance: Callable[[int], None]) -> bytes:
        """``order``: number of the ``part``, and ``sample_bytes``, how much of its text is kept to train a tokenizer.

        Returns what :class:`Scan` is made of.
        """
        part = self.parts[order["part"]]
        columns, sample, digest = _Columns(), _Sample(order["sample_bytes"]), PartDigest(part)
        lines, slice_now = [0] * len(part), 0
        for document in judged(self.corpus, part, self.max_characters):
            if document.slice != slice_now:
                advance(sum(piece.size for piece in part[slice_now : document.slice]))
                slice_now = document.slice
            digest.add(document)
            lines[document.slice] = document.found.place
            value = xxhash.xxh3_128_digest(document.data)
            if not document.kind:
                sample.add(len(columns.kinds), value, document.data)
            columns.add(document, value)
        advance(sum(piece.size for piece in part[slice_now:]))
        return _packed(columns, sample.texts(), digest.hex(), lines)


class _Columns:
    """What is kept of the documents: not what they say."""

    def __init__(self) -> None:
        self.slices, self.places, self.sizes, self.kinds = array("i"), array("q"), array("q"), array("B")
        self.hashes = bytearray()
        self.reasons: dict[int, str] = {}

    def add(self, document: Judged, value: bytes) -> None:
        if document.reason:
            self.reasons[len(self.kinds)] = document.reason
        self.slices.append(document.slice)
        self.places.append(document.found.place)
        self.sizes.append(len(document.data))
        self.kinds.append(document.kind)
        self.hashes += value


class _Sample:
    """The documents with the smallest hashes that have ``limit`` bytes together, of equal ones the first.

    Of longer documents only so much is kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._held: list[tuple[int, int, bytes]] = []  # a heap, the largest hash first
        self._hashes: set[int] = set()

    def add(self, number: int, value: bytes, data: bytes) -> None:
        key = -int.from_bytes(value, "big")
        if key in self._hashes or (self._size >= self._limit and (not self._held or key < self._held[0][0])):
            return
        heappush(self._held, (key, number, data[: self._limit]))
        self._hashes.add(key)
        self._size += len(data[: self._limit])
        while self._size - len(self._held[0][2]) >= self._limit:
            largest, _, text = heappop(self._held)
            self._hashes.remove(largest)
            self._size -= len(text)

    def texts(self) -> dict[int, str]:
        """By number of the document."""
        return {number: beginning(data, self._limit) for _, number, data in self._held}


def beginning(data: bytes, size: int) -> str:
    """The whole characters in the first ``size`` bytes of UTF-8."""
    return data[:size].decode(errors="ignore")


def _packed(columns: _Columns, sample: dict[int, str], digest: str, lines: list[int]) -> bytes:
    numbers = range(len(columns.kinds))
    hashes = pa.Array.from_buffers(pa.binary(16), len(numbers), [None, pa.py_buffer(bytes(columns.hashes))])
    arrays = [
        pa.array(np.asarray(columns.slices)),
        pa.array(np.asarray(columns.places)),
        hashes,
        pa.array(np.asarray(columns.sizes)),
        pa.array(np.asarray(columns.kinds)),
        pa.array((columns.reasons.get(number) for number in numbers), pa.string(), size=len(numbers)),
        pa.array((sample.get(number) for number in numbers), pa.large_string(), size=len(numbers)),
    ]
    schema = _SCHEMA.with_metadata({"sha256": digest, "lines": json.dumps(lines)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    return bytes(sink.getvalue())


class Scan:
    """What is known of the documents of a part: arrays of one entry per document, in order."""

    def __init__(self, data: bytes) -> None:
        """Raises ``ValueError`` for bytes that are none."""
        try:
            table = pa.ipc.open_file(data).read_all()
            if not table.schema.equals(_SCHEMA):
                raise ValueError("other columns")
            self.sha256: str = table.schema.metadata[b"sha256"].decode()
            self.lines: list[int] = json.loads(table.schema.metadata[b"lines"])
        except (pa.ArrowException, KeyError, TypeError, OSError) as error:
            raise ValueError(str(error)) from None
        self.slices, self.places, self.sizes, self.kinds = (
            table[name].to_numpy() for name in ("slice", "place", "bytes", "kind")
        )
        self.hashes = np.frombuffer(b"".join(table["hash"].to_pylist()), _HASH)
        self.reasons = table["reason"]
        self.sample = table["sample"]

    def __len__(self) -> int:
        return len(self.kinds)
