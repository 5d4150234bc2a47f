"""``manifest.json`` of a prepared data set: what the token shards hold and how to check it.

In format 3 each shard is a line of the file, behind the rest, which has the number of tokens of every shard. So opening
a data set parses no shard: each line is looked at when something of its shard is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import from_json

from elastic_train.data.errors import DataError
from elastic_train.storage.errors import NotFound
from elastic_train.storage.formats import KEY, newer_than

if TYPE_CHECKING:
    from typing import Self

    from elastic_train.storage.store import Store

MANIFEST = "manifest.json"
FORMAT_3 = b'{\n "format_version": 3,\n'
SHARDS, END = b',\n "shards": [\n', b"\n ]\n}\n"
"""Between the head and the lines of shards, and behind them. Nothing in the head can look like it: no string of JSON
has a line break in it, and what is nested has more space in front.
"""
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_SHARD_TOKENS: TypeAdapter[list[int]] = TypeAdapter(list[Annotated[int, Field(ge=1)]])


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


class ShardLines(Sequence[Shard]):
    """Shards as lines of a manifest: each is parsed and checked when it is asked for, and kept."""

    def __init__(self, lines: Sequence[bytes], tokens: Sequence[int], batch_tokens: int, name: str, first: int) -> None:
        """``tokens``: of each shard. ``name``: of the file, and number of its line that is the ``first`` one."""
        self.tokens, self._lines, self._batch_tokens = tokens, lines, batch_tokens
        self._name, self._first = name, first
        self._parsed: dict[int, Shard] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Shard: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Shard, ...]: ...

    def __getitem__(self, index: int | slice) -> Shard | tuple[Shard, ...]:
        """Raises :class:`DataError` for a line that is no shard, or another one than was announced."""
        numbers = range(len(self._lines))[index]
        return self._shard(numbers) if isinstance(numbers, int) else tuple(self._shard(number) for number in numbers)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def _shard(self, number: int) -> Shard:
        if number not in self._parsed:
            try:
                shard = Shard.model_validate_json(self._lines[number])
                if shard.tokens != self.tokens[number]:
                    raise ValueError(f"tokens={shard.tokens}, but shard_tokens has {self.tokens[number]}")
                _check(shard, self._batch_tokens)
            except ValueError as error:
                raise DataError(f"{self._name}, line {self._first + number}: {_first_problem(error)}") from None
            self._parsed[number] = shard
        return self._parsed[number]


def _as_shards(value: Any, handler: ValidatorFunctionWrapHandler) -> Sequence[Shard]:
    return value if isinstance(value, ShardLines) else tuple(handler(value))


class Manifest(Record):
    """The whole file. Documents are joined with ``tokenizer.eos_id`` after each; shards follow each other.

    Format 3 is written; formats 1 and 2 are read. ``labelled``: the column ``counts`` says which tokens count in the
    loss when they are what is predicted. ``left_out`` lists the documents that are not in it, one JSON object with
    ``name`` and ``reason`` per line; ``left_out_counts`` has their number by kind: duplicate, empty, not_utf8,
    too_long. ``inputs`` is everything that decides the tokens; ``inputs_sha256``, the sha256 of its JSON, tells whether
    a data set can be reused.
    """

    format_version: Literal[1, 2, 3] = 3
    tokenizer: Tokenizer
    dtype: Literal["uint16", "uint32"]
    labelled: bool = False
    tokens: Count
    documents: Count
    batch_tokens: Annotated[int, Field(ge=1)]
    shards: Annotated[Sequence[Shard], WrapValidator(_as_shards)]
    left_out: File | None = None
    left_out_counts: dict[str, Count] = {}
    inputs: dict[str, JsonValue]
    inputs_sha256: Sha256
    skipped: tuple[Skipped, ...] = ()

    @model_validator(mode="after")
    def _sums(self) -> Self:
        if isinstance(self.shards, ShardLines):  # each is checked when it is asked for
            return self
        for name in ("tokens", "documents"):
            total, said = sum(getattr(shard, name) for shard in self.shards), getattr(self, name)
            if total != said:
                raise ValueError(f"{name}={said}, but the shards have {total}")
        for shard in self.shards:
            _check(shard, self.batch_tokens, complete=self.format_version > 1)
        return self

    def shard_ends(self) -> list[int]:
        """The token of the stream behind the last one of each shard, without a look at any of them."""
        return list(accumulate(_tokens_of(self.shards)))

    @property
    def left_out_documents(self) -> int:
        """How many documents of the input are not in the data set."""
        return len(self.skipped) + sum(self.left_out_counts.values())

    def to_bytes(self) -> bytes:
        """The file's bytes, in format 3: the same for the same data set, wherever and whenever it was made."""
        head = self.model_dump(mode="json", exclude={"format_version", "shards", "skipped"})
        head = {"format_version": 3} | head | {"shard_tokens": list(_tokens_of(self.shards))}
        text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}").encode()
        return text + SHARDS + b",\n".join(shard.model_dump_json().encode() for shard in self.shards) + END


def _tokens_of(shards: Sequence[Shard]) -> Sequence[int]:
    return shards.tokens if isinstance(shards, ShardLines) else [shard.tokens for shard in shards]


def _check(shard: Shard, batch_tokens: int, complete: bool = True) -> None:
    """Raises ValueError where the parts of a shard do not fit together. ``complete``: with what format 1 has not."""
    wanted = -(-shard.tokens // batch_tokens)
    if len(shard.batches) != wanted:
        raise ValueError(
            f"shard {shard.path} lists {len(shard.batches)} batches, its {shard.tokens} tokens need {wanted}"
        )
    if complete and (shard.ends is None or len(shard.checksums) != wanted):
        raise ValueError(
            f"shard {shard.path} has {len(shard.checksums)} checksums for {wanted} batches "
            f"and {'no' if shard.ends is None else 'a'} file of ends; there must be one of each"
        )


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
    """Checked contents of a manifest file called ``name`` in errors; of format 3 the shards are checked when used."""
    try:
        return _in_lines(data, name) if data.startswith(FORMAT_3) else Manifest.model_validate_json(data)
    except ValueError as error:
        wrong = newer_than(_version(data), 3) or f"is not a manifest of format 1, 2 or 3: {_first_problem(error)}"
        raise DataError(f"{name} {wrong}") from None


def _version(data: bytes) -> object:
    """What a file says of its format; None when it says nothing."""
    try:
        return from_json(data)[KEY]
    except (ValueError, TypeError, KeyError):
        return None


def _in_lines(data: bytes, name: str) -> Manifest:
    head, shards, rest = data.partition(SHARDS)
    if not shards or not rest.endswith(END):
        raise ValueError("it has no lines of shards, or not all of them")
    fields = from_json(head + b"\n}")
    tokens, lines = _SHARD_TOKENS.validate_python(fields.pop("shard_tokens", None)), rest[: -len(END)].split(b",\n")
    if len(tokens) != len(lines) or sum(tokens) != fields.get("tokens"):
        total = f"{sum(tokens)} tokens in {len(tokens)} shards"
        raise ValueError(f"shard_tokens has {total}, it is said to have {fields.get('tokens')} in {len(lines)}")
    batch_tokens, first = fields.get("batch_tokens"), head.count(b"\n") + 3
    return Manifest.model_validate({**fields, "shards": ShardLines(lines, tokens, batch_tokens, name, first)})


def _first_problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'file'}: {first['msg']}"
