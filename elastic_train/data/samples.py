"""What a sample is: inputs, the tokens that are to be predicted, and which document each place is in.

Shape suffixes: B sequences of a micro-batch, T places of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

PADDING_LABEL = -100
"""Label of a position that counts in no loss."""


class Sample(NamedTuple):
    """One sequence, each int64 [T]. ``documents`` numbers the documents from 0; padding is one of its own."""

    input_ids: Tokens
    labels: Tokens
    documents: Tokens


class Slot(NamedTuple):
    """A micro-batch, or the samples of several, each int64 [B, T]."""

    input_ids: Tokens
    labels: Tokens
    documents: Tokens


class Samples(Protocol):
    """What batches are made of: a data set, or several."""

    @property
    def sequence_length(self) -> int: ...

    def __len__(self) -> int: ...

    def samples(self, indices: Sequence[int]) -> Slot: ...

    def prefetch(self, indices: Sequence[int]) -> None: ...

    def forget(self, indices: Sequence[int]) -> None: ...


def padding(sequences: int, sequence_length: int) -> Slot:
    """Sequences that count in no loss."""
    labels = np.full((sequences, sequence_length), PADDING_LABEL, np.int64)
    return Slot(np.zeros_like(labels), labels, np.zeros_like(labels))


def document_numbers(input_ids: Tokens, eos_id: int) -> Tokens:
    """Number, from 0 in each sequence, of the document that a token is in; int64, of the shape of ``input_ids``.

    For tokens of which nothing else is known: a document ends with its end-of-text token. The label there is the first
    token of the next document: it is predicted from the document that ends, and counts in the loss.
    """
    ends = np.zeros_like(input_ids)
    ends[..., 1:] = input_ids[..., :-1] == eos_id
    return np.cumsum(ends, axis=-1)
