"""The tokens of a data set, batch by batch: from its files, or through the node's cache from object storage."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_train.data.errors import DataError
from elastic_train.data.record_batches import decode_batch, fetch_batch, is_right

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_train.data.batch_memory import BatchMemory, Key
    from elastic_train.data.cache import BatchCache
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.record_batches import Batch
    from elastic_train.storage.store import Store


class TokenReader:
    """Any stretch of the stream of all shards. Opens nothing before it is asked for; safe to use from threads."""

    def __init__(self, store: Store, manifest: Manifest, cache: BatchCache, memory: BatchMemory) -> None:
        self._store, self._manifest = store, manifest
        self._cache = None if _is_local(store) else cache
        self._ends = manifest.shard_ends()
        self._memory = memory
        self._load = self._read_batch  # one object: what is in memory is known by it

    def read(self, start: int, tokens: np.ndarray[Any, Any], counts: np.ndarray[Any, Any] | None = None) -> None:
        """Fills ``tokens``, and ``counts`` of a labelled data set, both [n], with those at ``[start, start + n)``.

        Raises:
            IndexError: that is outside the stream.
            DataError: a shard is damaged, or has a token that is none of the tokenizer's.
            StorageError: the store does not answer.
        """
        if start < 0 or start + len(tokens) > self._manifest.tokens:
            end = start + len(tokens)
            raise IndexError(f"tokens {start} to {end} are outside the {self._manifest.tokens} tokens")
        done = 0
        for key, offset, length in self._stretches(start, len(tokens)):
            batch = self._memory.get(self._load, key)
            tokens[done : done + length] = batch.tokens[offset : offset + length]
            if counts is not None and batch.counts is not None:
                counts[done : done + length] = batch.counts[offset : offset + length]
            done += length

    def prefetch(self, start: int, count: int) -> None:
        """Have what ``read`` needs for ``[start, start + count)`` read in the background."""
        for key, _, _ in self._stretches(start, count):
            self._memory.prefetch(self._load, key)

    def _stretches(self, start: int, count: int) -> Iterator[tuple[Key, int, int]]:
        """(batch, first token in it, number of tokens) of each batch that has some of ``[start, start + count)``."""
        number, size = bisect_right(self._ends, start), self._manifest.batch_tokens
        while count:
            first = self._ends[number - 1] if number else 0
            batch, offset = divmod(start - first, size)
            length = min(size - offset, self._ends[number] - start, count)
            yield (number, batch), offset, length
            start, count = start + length, count - length
            number += start == self._ends[number]

    def _read_batch(self, key: Key) -> Batch:
        number, batch = key
        shard, manifest = self._manifest.shards[number], self._manifest
        fetch = partial(fetch_batch, self._store, shard, batch)
        if self._cache is None:
            message = fetch()
        else:
            message = self._cache.get(f"{shard.sha256[:32]}-{batch}", fetch, partial(is_right, shard, batch))
        where = f"{self._store.uri}/{shard.path}"
        try:
            loaded = decode_batch(message, manifest.dtype, manifest.labelled)
        except DataError as error:
            raise DataError(f"shard {where} is damaged: batch {batch} holds {error}") from None
        wanted = min(manifest.batch_tokens, shard.tokens - batch * manifest.batch_tokens)
        if len(loaded.tokens) != wanted:
            raise DataError(f"shard {where} is damaged: batch {batch} has {len(loaded.tokens)} tokens, not {wanted}")
        size = manifest.tokenizer.vocab_size
        if wanted and loaded.tokens.max() >= size:
            raise DataError(f"{where} has the token {loaded.tokens.max()}, the tokenizer only {size}: it is damaged")
        return loaded


def _is_local(store: Store) -> bool:
    return store.local_path("manifest.json") is not None
