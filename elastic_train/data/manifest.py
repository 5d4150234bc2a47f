"""``manifest.json`` of a prepared data set: what the token shards hold and how to check it."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from elastic_train.data.errors import DataError
from elastic_train.storage.errors import NotFound

if TYPE_CHECKING:
    from typing import Self

    from elastic_train.storage.store import Store

MANIFEST = "manifest.json"
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Record(BaseModel):
    """Base of the parts of the manifest: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tokenizer(Record):
    """``vocab_size`` counts the entries there are, which a small corpus may leave below what was asked for."""

    path: str
    sha256: Sha256
    vocab_size: Annotated[int, Field(ge=1)]
    eos_id: Count
    eos_token: str


class File(Record):
    """A file of the data set that is no shard."""

    path: str
    bytes: Annotated[int, Field(ge=1)]
    sha256: Sha256


class Shard(Record):
    """An Arrow IPC file with one column ``tokens``, and a second one ``counts`` (uint8) in a labelled data set.

    ``batches`` has (byte offset, bytes) of every record batch message: one ranged read fetches one batch of
    ``batch_tokens`` tokens; only the last batch of a shard may be shorter. ``checksums`` has the xxh3_64 (hex) of each
    message's bytes. ``ends`` is an Arrow IPC file with one column ``ends`` (uint64): the offset behind the last token
    (the end-of-text token) of each document that ends in this shard, from the shard's first token, ascending.
    Format 1 has neither.
    """

    path: str
    tokens: Annotated[int, Field(ge=1)]
    documents: Count
    bytes: Annotated[int, Field(ge=1)]
    sha256: Sha256
    batches: tuple[tuple[Count, Count], ...]
    checksums: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = ()
    ends: File | None = None


class Skipped(Record):
    """Format 1's entry of a document that is not in the data set, and why. Format 2 has the file ``left_out``."""

    name: str
    reason: str


class Manifest(Record):
    """The whole file. Documents are joined with ``tokenizer.eos_id`` after each; shards follow each other.

    Format 2 is written; format 1 is read. ``labelled``: the column ``counts`` says which tokens count in the loss when
    they are what is predicted. ``left_out`` lists the documents that are not in it, one JSON object with ``name`` and
    ``reason`` per line; ``left_out_counts`` has their number by kind: duplicate, empty, not_utf8, too_long.
    ``inputs`` is everything that decides the tokens; ``inputs_sha256``, the sha256 of its JSON, tells whether a data
    set can be reused.
    """

    format_version: Literal[1, 2] = 2
    tokenizer: Tokenizer
    dtype: Literal["uint16", "uint32"]
    labelled: bool = False
    tokens: Count
    documents: Count
    batch_tokens: Annotated[int, Field(ge=1)]
    shards: tuple[Shard, ...]
    left_out: File | None = None
    left_out_counts: dict[str, Count] = {}
    inputs: dict[str, JsonValue]
    inputs_sha256: Sha256
    skipped: tuple[Skipped, ...] = ()

    @model_validator(mode="after")
    def _sums(self) -> Self:
        for name in ("tokens", "documents"):
            total, said = sum(getattr(shard, name) for shard in self.shards), getattr(self, name)
            if total != said:
                raise ValueError(f"{name}={said}, but the shards have {total}")
        for shard in self.shards:
            wanted = -(-shard.tokens // self.batch_tokens)
            if len(shard.batches) != wanted:
                raise ValueError(
                    f"shard {shard.path} lists {len(shard.batches)} batches, its {shard.tokens} tokens need {wanted}"
                )
            if self.format_version == 2 and (shard.ends is None or len(shard.checksums) != wanted):
                raise ValueError(
                    f"shard {shard.path} has {len(shard.checksums)} checksums for {wanted} batches "
                    f"and {'no' if shard.ends is None else 'a'} file of ends; format 2 has one of each"
                )
        return self

    @property
    def left_out_documents(self) -> int:
        """How many documents of the input are not in the data set."""
        return len(self.skipped) + sum(self.left_out_counts.values())

    def to_bytes(self) -> bytes:
        """The file's bytes: the same for the same data set, wherever and whenever it was made."""
        return self.model_dump_json(indent=1, exclude={"skipped"}).encode() + b"\n"


def inputs_digest(inputs: dict[str, JsonValue]) -> str:
    """sha256 of the JSON of ``Manifest.inputs``."""
    return hashlib.sha256(json.dumps(inputs, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()


def read_manifest(store: Store) -> tuple[Manifest, str]:
    """The manifest of a data set and the sha256 of its bytes. Raises :class:`DataError` when it is not one."""
    try:
        data = store.read(MANIFEST)
    except NotFound:
        raise DataError(
            f"{store.uri} has no {MANIFEST}; prepare the data set with `elastic-train data prepare`"
        ) from None
    return parse_manifest(data, f"{store.uri}/{MANIFEST}"), hashlib.sha256(data).hexdigest()


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Checked contents of a manifest file called ``name`` in errors."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{name} is not a manifest of format 1 or 2: {place or 'file'}: {first['msg']}") from None
