"""Samples made of tokens, as a data set cuts them from its stream."""

from __future__ import annotations

import numpy as np

from elastic_train.data.samples import Sample, Tokens, document_numbers


def sample_of(tokens: Tokens, eos_id: int = 0) -> Sample:
    """T + 1 tokens as T inputs and the T that follow them."""
    tokens = tokens.astype(np.int64)
    return Sample(tokens[:-1], tokens[1:], document_numbers(tokens[:-1], eos_id))
