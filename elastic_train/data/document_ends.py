"""Which document each token of the stream is in: from the files of ends, or from the tokens where there are none."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.record_batches import read_ends
from elastic_train.data.samples import document_numbers

if TYPE_CHECKING:
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.samples import Tokens
    from elastic_train.storage.store import Store


class DocumentEnds:
    """Where documents end. The file of a shard is read when a sample first needs it, and kept.

    Format 1 has no such files: there a document ends with each end-of-text token. Elsewhere such a token says nothing:
    in conversations it may end every turn.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._eos_id = manifest.tokenizer.eos_id
        self._shard_ends = list(accumulate(shard.tokens for shard in manifest.shards))
        self._known = all(shard.ends is not None for shard in manifest.shards)

        @cache
        def ends_in(number: int) -> Tokens:
            shard = manifest.shards[number]
            return read_ends(store, shard) + (self._shard_ends[number] - shard.tokens)

        self._ends_in = ends_in

    def numbers(self, start: int, tokens: Tokens) -> Tokens:
        """Number, from 0, of the document that each of ``tokens`` is in; int64 [n]. They begin at token ``start``.

        Raises DataError, StorageError as ``read_ends``.
        """
        if not self._known:
            return document_numbers(tokens, self._eos_id)
        begins = np.zeros(len(tokens), np.int64)
        last = start + len(tokens) - 1
        number = bisect_right(self._shard_ends, start)
        while True:
            ends = self._ends_in(number)
            first, behind = np.searchsorted(ends, (start, last), side="right")
            begins[ends[first:behind] - start] = 1
            if self._shard_ends[number] >= last:
                return np.cumsum(begins)
            number += 1
