"""``manifest.json`` of a prepared data set: what the token shards hold and how to check it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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


class Shard(Record):
    """An Arrow IPC file with one column ``tokens``.

    ``batches`` has (byte offset, bytes) of every record batch message: one ranged read fetches one batch of
    ``batch_tokens`` tokens; only the last batch of a shard may be shorter.
    """

    path: str
    tokens: Annotated[int, Field(ge=1)]
    documents: Count
    bytes: Annotated[int, Field(ge=1)]
    sha256: Sha256
    batches: tuple[tuple[Count, Count], ...]


class Skipped(Record):
    """A document of the corpus that is not in the data set, and why."""

    name: str
    reason: str


class Inputs(Record):
    """Everything that decides the tokens; its digest tells whether a data set can be reused."""

    corpus: str
    corpus_sha256: Sha256
    corpus_bytes: Count
    vocab_size: Annotated[int, Field(ge=1)]
    tokenizer: str = "byte-level BPE"
    tokenizer_sample_bytes: Annotated[int, Field(ge=1)]
    tokenizer_sample: str = "whole documents, spread evenly over the corpus"
    shard_tokens: Annotated[int, Field(ge=1)]
    batch_tokens: Annotated[int, Field(ge=1)]

    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Manifest(Record):
    """The whole file. Documents are joined with ``tokenizer.eos_id`` after each; shards follow each other."""

    format_version: Literal[1] = 1
    tokenizer: Tokenizer
    dtype: Literal["uint16", "uint32"]
    tokens: Count
    documents: Count
    batch_tokens: Annotated[int, Field(ge=1)]
    shards: tuple[Shard, ...]
    inputs: Inputs
    inputs_sha256: Sha256
    skipped: tuple[Skipped, ...] = ()

    @model_validator(mode="after")
    def _sums(self) -> Self:
        total = sum(shard.tokens for shard in self.shards)
        if total != self.tokens:
            raise ValueError(f"tokens={self.tokens}, but the shards have {total}")
        for shard in self.shards:
            wanted = -(-shard.tokens // self.batch_tokens)
            if len(shard.batches) != wanted:
                raise ValueError(
                    f"shard {shard.path} lists {len(shard.batches)} batches, its {shard.tokens} tokens need {wanted}"
                )
        return self

    def to_bytes(self) -> bytes:
        """The file's bytes: the same for the same data set, wherever and whenever it was made."""
        return self.model_dump_json(indent=1).encode() + b"\n"


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
        raise DataError(f"{name} is not a manifest of format 1: {place or 'file'}: {first['msg']}") from None
