"""Samples made of tokens, as a data set cuts them from its stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from elastic_train.data.samples import Sample, Slot, Tokens, document_numbers


def sample_of(tokens: Tokens, eos_id: int = 0) -> Sample:
    """T + 1 tokens as T inputs and the T that follow them."""
    tokens = tokens.astype(np.int64)
    return Sample(tokens[:-1], tokens[1:], document_numbers(tokens[:-1], eos_id))


class OneByOne(ABC):
    """``data.samples.Samples`` that are made one by one, where nothing is read ahead."""

    @abstractmethod
    def sample(self, index: int) -> Sample: ...

    def samples(self, indices: Sequence[int]) -> Slot:
        return Slot(*(np.stack(arrays) for arrays in zip(*map(self.sample, indices), strict=True)))

    def prefetch(self, indices: Sequence[int]) -> None:
        raise AssertionError(f"samples {indices} are read ahead")

    forget = prefetch
