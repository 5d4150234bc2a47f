"""The tokens of a data set, batch by batch: from its files, or through the node's cache from object storage."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_train.data.errors import DataError
from elastic_train.data.record_batches import decode_batch, fetch_batch, is_right

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        self._ends, self._batch_tokens = manifest.shard_ends(), manifest.batch_tokens
        self._memory = memory
        self._load = self._read_batch  # one object: what is in memory is known by it

    def read(self, start: int, tokens: np.ndarray[Any, Any], counts: np.ndarray[Any, Any] | None = None) -> None:
        """Fills ``tokens``, and ``counts`` of a labelled data set, both [n], with those at ``[start, start + n)``.

        Raises:
            IndexError: that is outside the stream.
            DataError: a shard is damaged, or has a token that is none of the tokenizer's.
            StorageError: the store does not answer.
        """
        done, count = 0, len(tokens)
        if start < 0 or start + count > self._manifest.tokens:
            end = start + count
            raise IndexError(f"tokens {start} to {end} are outside the {self._manifest.tokens} tokens")
        while done < count:
            key, offset = self._place(start + done)
            batch = self._memory.get(self._load, key)
            end = min(done + len(batch.tokens) - offset, count)
            tokens[done:end] = batch.tokens[offset : offset + end - done]
            if counts is not None and batch.counts is not None:
                counts[done:end] = batch.counts[offset : offset + end - done]
            done = end

    def prefetch(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Have what ``read`` needs for each (start, count) read in the background: each will be read once."""
        self._memory.prefetch(self._load, self._keys(stretches))

    def forget(self, stretches: Iterable[tuple[int, int]]) -> None:
        """They will not be read, after all."""
        self._memory.forget(self._load, self._keys(stretches))

    def _keys(self, stretches: Iterable[tuple[int, int]]) -> Iterator[Key]:
        for start, count in stretches:
            end = start + count
            while start < end:
                key, offset = self._place(start)
                yield key
                start = min(start - offset + self._batch_tokens, self._ends[key[0]])

    def _place(self, token: int) -> tuple[Key, int]:
        """The batch that has a token of the stream, and where in it."""
        number = bisect_right(self._ends, token)
        batch, offset = divmod(token - (self._ends[number - 1] if number else 0), self._batch_tokens)
        return (number, batch), offset

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
