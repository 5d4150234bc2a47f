"""First look at a part of the input: what its documents hash to, and which cannot be used."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
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
        for found in read_slice(corpus, stores[piece.file.store], piece):
            yield _judge(number, found, max_characters)


def _judge(number: int, found: Found, max_characters: int | None) -> Judged:
    if found.text is None:
        return Judged(number, found, b"", KINDS.index("not_utf8"), found.problem)
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
        self._digest.update(b"%d %d %d " % (document.kind, len(name), len(document.data)) + name + document.data)
        self._digest.update(repr(document.found.spans).encode())

    def hex(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Looks at one part. ``sample_share``: of the documents, whose text is kept for the training of a tokenizer."""

    corpus: Corpus
    parts: tuple[Part, ...]
    max_characters: int | None
    sample_share: float

    def __call__(self, order: dict[str, Any], advance: Callable[[int], None]) -> bytes:
        """``order``: number of the part. Returns what :class:`Scan` is made of."""
        part = self.parts[order["part"]]
        rows: list[Judged] = []
        digest, lines, slice_now = PartDigest(part), [0] * len(part), 0
        for document in judged(self.corpus, part, self.max_characters):
            if document.slice != slice_now:
                advance(sum(piece.size for piece in part[slice_now : document.slice]))
                slice_now = document.slice
            digest.add(document)
            lines[document.slice] = document.found.place
            rows.append(document)
        advance(sum(piece.size for piece in part[slice_now:]))
        return _packed(rows, sample_limit(self.sample_share), digest.hex(), lines)


def sample_limit(share: float) -> int:
    """Documents whose hash begins with less are a sample of about ``share`` of them: the same ones in any order."""
    return min(int(share * 2**64), 2**64)


def _packed(rows: list[Judged], limit: int, digest: str, lines: list[int]) -> bytes:
    hashes = [xxhash.xxh3_128_digest(row.data) for row in rows]
    sampled = [
        not row.kind and int.from_bytes(value[:8], "big") < limit for row, value in zip(rows, hashes, strict=True)
    ]
    columns = [
        [row.slice for row in rows],
        [row.found.place for row in rows],
        hashes,
        [len(row.data) for row in rows],
        [row.kind for row in rows],
        [row.reason or None for row in rows],
        [row.found.text if taken else None for row, taken in zip(rows, sampled, strict=True)],
    ]
    schema = _SCHEMA.with_metadata({"sha256": digest, "lines": json.dumps(lines)})
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
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
