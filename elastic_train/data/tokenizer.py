"""Byte-level BPE tokenizers: training and encoding."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic_train.data.errors import DataError
from elastic_train.storage.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elastic_train.data.corpus import Document
    from elastic_train.storage.store import Store

EOS = "<|endoftext|>"
EOS_ID = 0
SMALLEST_VOCABULARY = 257
"""256 bytes and the end of a document."""
ENCODE_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """A ``tokenizer.json`` that was made elsewhere, byte for byte, and the id that ends a document."""

    text: bytes
    eos_id: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


def read_tokenizer(folder: Store) -> GivenTokenizer:
    """The tokenizer of a Hugging Face model folder; ``config.json`` says which id ends a text (the first, of several).

    Raises DataError when there is none, or no such id.
    """
    try:
        text, config = folder.read("tokenizer.json"), json.loads(folder.read("config.json"))
    except NotFound as error:
        raise DataError(f"{error}; a tokenizer is a folder with tokenizer.json and config.json") from None
    except ValueError as error:
        raise DataError(f"config.json in {folder.uri} is not JSON: {error}") from None
    eos = config.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise DataError(f"config.json in {folder.uri} has eos_token_id={eos}; documents need an id that ends them")
    return GivenTokenizer(text, eos)


def parse_tokenizer(given: GivenTokenizer) -> Tokenizer:
    """Raises DataError for text that is no tokenizer, or has no entry for the end of a document."""
    try:
        tokenizer = Tokenizer.from_str(given.text.decode())
    except Exception as error:  # the library has no type for it
        raise DataError(f"tokenizer.json cannot be read: {error}") from None
    if tokenizer.id_to_token(given.eos_id) is None:
        raise DataError(f"tokenizer.json has no entry {given.eos_id}, the eos_token_id of config.json")
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


def sample_documents(documents: Iterable[Document], total_bytes: int, sample_bytes: int) -> Iterator[str]:
    """Texts of about ``sample_bytes`` of the ``total_bytes``: whole documents, spread evenly, always the same ones."""
    credit = 0.0
    for document in documents:
        size = len(document.text.encode())
        credit += size * min(1.0, sample_bytes / max(total_bytes, 1))
        if credit >= size or total_bytes <= sample_bytes:
            credit -= size
            yield document.text


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[Document], dtype: str, eos_id: int = EOS_ID
) -> Iterator[tuple[np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]], int]]:
    """(tokens with ``eos_id`` after them, bytes of text) of each document, in order.

    Text that spells a special token is encoded as the ordinary characters that it is.
    """
    tokenizer.encode_special_tokens = True
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document.text)
        characters += len(document.text)
        if characters >= ENCODE_BATCH_CHARACTERS:
            yield from _encode(tokenizer, batch, dtype, eos_id)
            batch, characters = [], 0
    if batch:
        yield from _encode(tokenizer, batch, dtype, eos_id)


def _encode(
    tokenizer: Tokenizer, texts: list[str], dtype: str, eos_id: int
) -> Iterator[tuple[np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]], int]]:
    for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        yield np.array([*encoding.ids, eos_id], dtype=dtype), len(text.encode())
