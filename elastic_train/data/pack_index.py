"""Which pieces of documents each sample of a data set has: from the files of ends, worked out once per node.

That is done shard by shard, and each is kept by itself: what a process that is ended has done stays done, and of
several that open a data set at once each shard is worked out by one. What is kept is mapped, so all processes of a node
have it in memory once.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from elastic_train.data.errors import DataError
from elastic_train.data.packing import PackedSamples, Pieces, ShardSamples, StreamSamples, cut, one_per_sample, pack
from elastic_train.data.record_batches import read_ends

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.data.cache import BatchCache
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.packing import Array, Cutting
    from elastic_train.storage.store import Store

READERS = 8
"""Files of ends that are read at a time: each is small, and storage takes its time to answer."""
VERSION = 2
"""Of the packing and of the index's bytes: an index of another one is not looked at."""


def samples_of(
    store: Store,
    manifest: Manifest,
    digest: str,
    cutting: Cutting,
    cache: BatchCache,
    on_progress: Callable[[], None] = lambda: None,
) -> StreamSamples | ShardSamples:
    """The samples of a data set. ``digest``: sha256 of its manifest. Raises DataError, StorageError as ``read_ends``.

    For a stream that is arithmetic. Documents are packed shard by shard, each in the shard that it ends in;
    ``on_progress`` is called after each shard.
    """
    if cutting.packing == "stream":
        return StreamSamples(manifest.tokens, cutting.sequence_length, cutting.tails)
    shards: list[tuple[int, PackedSamples]] = []
    open_tokens = 0  # of the document that has not ended yet, at the end of the shards so far
    with ThreadPoolExecutor(READERS) as readers:
        ahead = _EndsAhead(store, manifest, readers)
        for number, (first, end) in enumerate(pairwise([0, *manifest.shard_ends()])):
            name = hashlib.sha256(f"pack {VERSION} {digest} {number} {cutting}".encode()).hexdigest()
            make = partial(_made, ahead, number, end - first, open_tokens, cutting)
            open_tokens, samples = _parsed(cache.mapped(f"{name}-pack", make, _is_whole))
            shards.append((first, samples))
            on_progress()
    if open_tokens:
        raise DataError(
            f"the documents of {store.uri} end at token {manifest.tokens - open_tokens}, it has {manifest.tokens}: "
            "it is damaged"
        )
    return ShardSamples(shards)


class _EndsAhead:
    """Files of ends, those of the next shards on their way."""

    def __init__(self, store: Store, manifest: Manifest, readers: ThreadPoolExecutor) -> None:
        self._store, self._shards, self._readers = store, manifest.shards, readers
        self._coming: dict[int, Future[Array]] = {}

    def of(self, number: int) -> Array:
        """As ``read_ends``."""
        for each in range(number, min(number + READERS, len(self._shards))):
            if each not in self._coming:
                self._coming[each] = self._readers.submit(read_ends, self._store, self._shards[each])
        return self._coming.pop(number).result()


def _made(ahead: _EndsAhead, number: int, tokens: int, open_tokens: int, cutting: Cutting) -> bytes:
    ends = ahead.of(number)
    begins = np.concatenate([[-open_tokens], ends[:-1]]) if len(ends) else ends
    still_open = tokens - int(ends[-1]) if len(ends) else open_tokens + tokens
    return _bytes(still_open, packed(begins, ends, cutting))


def packed(begins: Array, ends: Array, cutting: Cutting) -> PackedSamples:
    """The samples of the documents at tokens ``[begins, ends)``."""
    pieces = cut(begins, ends, cutting.sequence_length, cutting.tails)
    return pack(pieces, cutting.sequence_length) if cutting.packing == "documents" else one_per_sample(pieces)


def _bytes(open_tokens: int, samples: PackedSamples) -> bytes:
    """int64: tokens behind the last end, number of samples, of pieces; offsets, starts, lengths; xxh3 of all that."""
    starts, lengths = samples.pieces.starts, samples.pieces.lengths
    header = np.array([open_tokens, len(samples), len(starts)], np.int64)
    content = np.concatenate([header, samples.offsets, starts, lengths]).astype("<i8").tobytes()
    return content + xxhash.xxh3_64_digest(content)


def _is_whole(data: bytes | memoryview) -> bool:
    return xxhash.xxh3_64_digest(data[:-8]) == data[-8:]


def _parsed(data: memoryview) -> tuple[int, PackedSamples]:
    numbers = np.frombuffer(data, "<i8", len(data) // 8 - 1)
    open_tokens, samples, pieces = numbers[:3].tolist()
    offsets, starts, lengths = np.split(numbers[3:], [samples + 1, samples + 1 + pieces])
    return open_tokens, PackedSamples(Pieces(starts, lengths), offsets)
