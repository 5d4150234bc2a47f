"""Second look at a part of the input: its documents are encoded and written as shards of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Shard
from elastic_train.data.scan import PartDigest, judged
from elastic_train.data.shards import NOTHING, Stretch, write_shard
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
        for number, stretches in groupby(self._stretches(order, digest, advance), itemgetter(0)):
            path = f"{self.folder}/shard-{order['part']:05d}{f'-{number}' if number else ''}.arrow"
            taken = (stretch for _, stretch in stretches)
            labelled = self.corpus.chat is not None
            shards.append(write_shard(store, path, taken, self.dtype, self.batch_tokens, labelled))
        if digest.hex() != order["sha256"]:
            names = sorted({piece.file.uri for piece in self.parts[order["part"]]})
            raise DataError(
                f"{names[0]} or one of the {len(names)} files of its part has changed while it was prepared"
            )
        return _SHARDS.dump_json(tuple(shards))

    def _stretches(
        self, order: dict[str, Any], digest: PartDigest, advance: Callable[[int], None]
    ) -> Iterator[tuple[int, Stretch]]:
        """(number of the shard in the part, documents or parts of one): shards are cut at exactly ``shard_tokens``."""
        tokens = 0
        for ids, size, counts in self._encoded(order, digest):
            advance(size)
            document, begin = np.array(ids, self.dtype), 0
            while begin < len(document):
                shard, place = divmod(tokens, self.shard_tokens)
                end = min(begin + self.shard_tokens - place, len(document))
                ends = (end - begin,) if end == len(document) else ()
                yield shard, Stretch(document[begin:end], ends, counts[begin:end])
                tokens, begin = tokens + end - begin, end

    def _encoded(self, order: dict[str, Any], digest: PartDigest) -> Iterator[tuple[list[int], int, Counts]]:
        spans: deque[Spans] = deque()  # of what was taken and is not yet encoded
        texts = self._texts(order, digest, spans)
        if self.corpus.chat is not None:
            tokenizer = for_offsets(self.tokenizer)
            yield from encode_conversations(tokenizer, texts, iter(spans.popleft, None), self.tokenizer.eos_id)
            return
        for ids, size in encode_documents(parse_tokenizer(self.tokenizer), texts, self.tokenizer.eos_id):
            yield ids, size, NOTHING

    def _texts(self, order: dict[str, Any], digest: PartDigest, spans: deque[Spans]) -> Iterator[tuple[str, int]]:
        duplicates = set(order["duplicates"])
        for number, document in enumerate(judged(self.corpus, self.parts[order["part"]], self.max_characters)):
            digest.add(document)
            if not document.kind and number not in duplicates and document.found.text is not None:
                spans.append(document.found.spans)
                yield document.found.text, len(document.data)


def read_shards(data: bytes) -> tuple[Shard, ...]:
    """What an :class:`EncodeTask` returned. Raises ``ValueError`` for anything else."""
    try:
        return _SHARDS.validate_json(data)
    except ValidationError as error:
        raise ValueError(str(error)) from None
