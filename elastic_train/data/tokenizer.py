"""Byte-level BPE tokenizers: training and encoding."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic_train.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Spans = tuple[tuple[int, int], ...]
    Counts = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

EOS = "<|endoftext|>"
EOS_ID = 0
SMALLEST_VOCABULARY = 257
"""256 bytes and the end of a document."""
ENCODE_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """A ``tokenizer.json``, byte for byte, and the id that ends a document."""

    text: bytes
    eos_id: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


def parse_tokenizer(given: GivenTokenizer) -> Tokenizer:
    """Raises DataError for text that is no tokenizer, or has no entry for the end of a document."""
    tokenizer = load_tokenizer(given.text)
    if tokenizer.id_to_token(given.eos_id) is None:
        raise DataError(f"tokenizer.json has no entry {given.eos_id}, which shall end documents")
    return tokenizer


def number_of_entries(given: GivenTokenizer) -> int:
    """One more than the largest id: the ids of a tokenizer from elsewhere may have gaps. Raises DataError."""
    return max(parse_tokenizer(given).get_vocab().values()) + 1


def check_end(given: GivenTokenizer) -> None:
    """Raises DataError when a text can spell the token that ends a document: it would end there."""
    tokenizer = parse_tokenizer(given)
    tokenizer.encode_special_tokens = True
    name = tokenizer.id_to_token(given.eos_id)
    for text in (name, f"a{name}a", tokenizer.decode([given.eos_id], skip_special_tokens=False)):
        if given.eos_id in tokenizer.encode(text, add_special_tokens=False).ids:
            raise DataError(
                f"tokenizer.json: the text {text!r} is encoded as entry {given.eos_id} ({name}), which shall end "
                "documents; accepted is one that no text can spell: a special token"
            )


def load_tokenizer(text: bytes) -> Tokenizer:
    """Raises DataError for text that is no tokenizer."""
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as error:  # the library has no type for it
        raise DataError(f"tokenizer.json cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` entries; id 0 ends a document. The same texts give the same tokenizer."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"vocab_size={vocab_size} is too small; byte-level BPE needs at least {SMALLEST_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[tuple[str, int]], eos_id: int
) -> Iterator[tuple[list[int], int]]:
    """(ids with ``eos_id`` after them, size) of each document, given as (text, size), in order.

    Text that spells a special token is encoded as the ordinary characters that it is.
    """
    tokenizer.encode_special_tokens = True
    for batch in _batches(documents):
        encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for (_, size), encoding in zip(batch, encodings, strict=True):
            yield [*encoding.ids, eos_id], size


def encode_conversations(
    tokenizer: Tokenizer, documents: Iterable[tuple[str, int]], spans: Iterable[Spans], eos_id: int
) -> Iterator[tuple[list[int], int, Counts]]:
    """(ids, size, counts) of each conversation. ``counts`` (uint8 [ids]) is 1 where a token begins inside of its
    ``spans`` of characters.

    Special tokens in the text are what they spell. ``eos_id`` follows where the text does not end with it.
    """
    tokenizer.encode_special_tokens = False
    places = iter(spans)
    for batch in _batches(documents):
        encodings = tokenizer.encode_batch([text for text, _ in batch], add_special_tokens=False)
        for (_, size), encoding in zip(batch, encodings, strict=True):
            ids, counts = encoding.ids, _counted(encoding.offsets, next(places))
            if ids[-1:] != [eos_id]:
                ids, counts = [*ids, eos_id], np.append(counts, np.uint8(0))
            yield ids, size, counts


def for_offsets(given: GivenTokenizer) -> Tokenizer:
    """The tokenizer of which every token's offsets are all its characters: post-processors cut spaces off."""
    parse_tokenizer(given)
    plain = {**json.loads(given.text), "post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(plain))


def special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """What is a special token wherever a text spells it."""
    return tuple(sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special))


def _counted(offsets: list[tuple[int, int]], spans: Spans) -> Counts:
    starts = np.array([start for start, _ in offsets], np.int64)
    counts = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        counts[np.searchsorted(starts, start) : np.searchsorted(starts, end)] = 1
    return counts


def _batches(documents: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document[0])
        if characters >= ENCODE_BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
