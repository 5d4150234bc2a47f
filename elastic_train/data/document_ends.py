"""Which document each token of the stream is in: from the files of ends, or from the tokens where there are none."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.record_batches import read_ends
from elastic_train.data.samples import document_numbers

if TYPE_CHECKING:
    from elastic_train.data.cache import BatchCache
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.samples import Tokens
    from elastic_train.storage.store import Store


class DocumentEnds:
    """Where documents end. The file of a shard is fetched when a sample first needs it, once per node, and mapped.

    Format 1 has no such files: there a document ends with each end-of-text token. Elsewhere such a token says nothing:
    in conversations it may end every turn.
    """

    def __init__(self, store: Store, manifest: Manifest, cache: BatchCache) -> None:
        self._store, self._shards, self._cache = store, manifest.shards, cache
        self._eos_id = manifest.tokenizer.eos_id
        self._shard_ends = manifest.shard_ends()
        self._known = manifest.format_version > 1
        self._read: dict[int, Tokens] = {}
        """by shard: offsets from its first token"""

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
            ends, shard = self._ends_in(number), self._shard_ends[number - 1] if number else 0
            first, behind = np.searchsorted(ends, (start - shard, last - shard), side="right")
            begins[ends[first:behind] + (shard - start)] = 1
            if self._shard_ends[number] >= last:
                return np.cumsum(begins)
            number += 1

    def _ends_in(self, number: int) -> Tokens:
        if number not in self._read:
            self._read[number] = read_ends(self._store, self._shards[number], self._cache)
        return self._read[number]
