"""Byte-level BPE tokenizers: training and encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic_train.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elastic_train.data.corpus import Document

EOS = "<|endoftext|>"
EOS_ID = 0
SMALLEST_VOCABULARY = 257
"""256 bytes and the end of a document."""
ENCODE_BATCH_CHARACTERS = 2**20


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


def load_tokenizer(text: bytes) -> Tokenizer:
    """The tokenizer that ``text``, the content of a ``tokenizer.json``, describes."""
    return Tokenizer.from_str(text.decode())


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
    tokenizer: Tokenizer, documents: Iterable[Document], dtype: str
) -> Iterator[tuple[np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]], int]]:
    """(tokens with the end-of-document id after them, bytes of text) of each document, in order.

    Text that spells a special token is encoded as the ordinary characters that it is.
    """
    tokenizer.encode_special_tokens = True
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document.text)
        characters += len(document.text)
        if characters >= ENCODE_BATCH_CHARACTERS:
            yield from _encode(tokenizer, batch, dtype)
            batch, characters = [], 0
    if batch:
        yield from _encode(tokenizer, batch, dtype)


def _encode(
    tokenizer: Tokenizer, texts: list[str], dtype: str
) -> Iterator[tuple[np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]], int]]:
    for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        yield np.array([*encoding.ids, EOS_ID], dtype=dtype), len(text.encode())
