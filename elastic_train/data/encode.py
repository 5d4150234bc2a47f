"""Second look at a part of the input: its documents are encoded and written as shards of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Shard
from elastic_train.data.scan import PartDigest, judged
from elastic_train.data.shards import write_shard
from elastic_train.data.tokenizer import encode_conversations, encode_documents, for_offsets, parse_tokenizer
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.corpus import Corpus
    from elastic_train.data.parts import Part
    from elastic_train.data.tokenizer import Counts, GivenTokenizer, Spans

_SHARDS: TypeAdapter[tuple[Shard, ...]] = TypeAdapter(tuple[Shard, ...])


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """Encodes one part. The shards' names begin with ``folder`` in the store ``out``."""

    corpus: Corpus
    parts: tuple[Part, ...]
    max_characters: int | None
    tokenizer: GivenTokenizer
    dtype: Literal["uint16", "uint32"]
    shard_tokens: int
    batch_tokens: int
    out: str
    storage: StorageConfig | None
    folder: str

    def __call__(self, order: dict[str, Any], advance: Callable[[int], None]) -> bytes:
        """``order``: number of the ``part``, which of its documents are ``duplicates``, and its ``sha256``.

        Returns the shards, as :func:`read_shards` takes them. Raises :class:`DataError` when the part is another one
        than it was at the first look.
        """
        store, digest = Store.open(self.out, self.storage), PartDigest(self.parts[order["part"]])
        shards: list[Shard] = []
        for tokens, ends, counts in self._shards(order, digest, advance):
            number = f"-{len(shards)}" if shards else ""
            path = f"{self.folder}/shard-{order['part']:05d}{number}.arrow"
            shards.append(write_shard(store, path, tokens, ends, self.batch_tokens, counts))
        if digest.hex() != order["sha256"]:
            names = sorted({piece.file.uri for piece in self.parts[order["part"]]})
            raise DataError(
                f"{names[0]} or one of the {len(names)} files of its part has changed while it was prepared"
            )
        return _SHARDS.dump_json(tuple(shards))

    def _shards(self, order: dict[str, Any], digest: PartDigest, advance: Callable[[int], None]) -> Iterator[Columns]:
        """Columns of the part's shards, cut at exactly ``shard_tokens``."""
        held = _Held(self.dtype, self.corpus.chat is not None)
        for ids, size, counts in self._encoded(order, digest):
            advance(size)
            begin = 0
            while held.tokens + len(ids) - begin >= self.shard_tokens:
                room = self.shard_tokens - held.tokens
                held.add(ids[begin : begin + room], counts[begin : begin + room], ended=begin + room == len(ids))
                begin += room
                yield held.take()
            if begin < len(ids):
                held.add(ids[begin:], counts[begin:], ended=True)
        if held.tokens:
            yield held.take()

    def _encoded(self, order: dict[str, Any], digest: PartDigest) -> Iterator[tuple[list[int], int, Counts]]:
        spans: deque[Spans] = deque()  # of what was taken and is not yet encoded
        texts = self._texts(order, digest, spans)
        if self.corpus.chat is not None:
            tokenizer = for_offsets(self.tokenizer)
            yield from encode_conversations(tokenizer, texts, iter(spans.popleft, None), self.tokenizer.eos_id)
            return
        nothing = np.zeros(0, np.uint8)
        for ids, size in encode_documents(parse_tokenizer(self.tokenizer), texts, self.tokenizer.eos_id):
            yield ids, size, nothing

    def _texts(self, order: dict[str, Any], digest: PartDigest, spans: deque[Spans]) -> Iterator[tuple[str, int]]:
        duplicates = set(order["duplicates"])
        for number, document in enumerate(judged(self.corpus, self.parts[order["part"]], self.max_characters)):
            digest.add(document)
            if not document.kind and number not in duplicates and document.found.text is not None:
                spans.append(document.found.spans)
                yield document.found.text, len(document.data)


Columns = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]", "Counts | None"]


@dataclass(slots=True)
class _Held:
    """The shard that is being filled."""

    dtype: Literal["uint16", "uint32"]
    labelled: bool
    tokens: int = 0
    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, ids: list[int], counts: Counts, ended: bool) -> None:
        self.ids.append(np.array(ids, self.dtype))
        self.counts.append(counts)
        self.tokens += len(ids)
        if ended:
            self.ends.append(self.tokens)

    def take(self) -> Columns:
        """(tokens, ends, counts) of the shard; the next one is empty."""
        counts = np.concatenate(self.counts) if self.labelled else None
        columns = np.concatenate(self.ids), np.array(self.ends, np.uint64), counts
        self.tokens, self.ids, self.counts, self.ends = 0, [], [], []
        return columns


def read_shards(data: bytes) -> tuple[Shard, ...]:
    """What an :class:`EncodeTask` returned. Raises ``ValueError`` for anything else."""
    try:
        return _SHARDS.validate_json(data)
    except ValidationError as error:
        raise ValueError(str(error)) from None
