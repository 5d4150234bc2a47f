"""Which pieces of documents each sample of a data set has: from the files of ends, worked out once per node."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from elastic_train.data.errors import DataError
from elastic_train.data.packing import PackedSamples, Pieces, StreamSamples, cut, one_per_sample, pack
from elastic_train.data.record_batches import read_ends

if TYPE_CHECKING:
    from elastic_train.data.cache import BatchCache
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.packing import Array, Cutting
    from elastic_train.storage.store import Store

READERS = 8
"""Files of ends that are read at a time: each is small, and storage takes its time to answer."""
VERSION = 1
"""Of the packing and of the index's bytes: an index of another one is not looked at."""


def samples_of(
    store: Store, manifest: Manifest, digest: str, cutting: Cutting, cache: BatchCache
) -> StreamSamples | PackedSamples:
    """The samples of a data set. ``digest``: sha256 of its manifest. Raises DataError, StorageError as ``read_ends``.

    For a stream that is arithmetic. Documents are packed shard by shard, each in the shard that it ends in.
    """
    if cutting.packing == "stream":
        return StreamSamples(manifest.tokens, cutting.sequence_length, cutting.tails)
    name = hashlib.sha256(f"pack {VERSION} {digest} {cutting}".encode()).hexdigest()
    return _parsed(cache.get(f"{name}-pack", partial(_made, store, manifest, cutting), _is_whole))


def _made(store: Store, manifest: Manifest, cutting: Cutting) -> bytes:
    parts: list[PackedSamples] = []
    with ThreadPoolExecutor(READERS) as readers:
        all_ends = list(readers.map(partial(read_ends, store), manifest.shards))
    before = 0
    firsts = accumulate((shard.tokens for shard in manifest.shards), initial=0)
    for first, ends_in_shard in zip(firsts, all_ends, strict=False):
        ends = first + ends_in_shard
        begins = np.concatenate([[before], ends[:-1]]) if len(ends) else ends
        before = int(ends[-1]) if len(ends) else before
        parts.append(packed(begins, ends, cutting))
    if before != manifest.tokens:
        raise DataError(f"the documents of {store.uri} end at token {before}, it has {manifest.tokens}: it is damaged")
    return _bytes(parts)


def packed(begins: Array, ends: Array, cutting: Cutting) -> PackedSamples:
    """The samples of the documents at tokens ``[begins, ends)``."""
    pieces = cut(begins, ends, cutting.sequence_length, cutting.tails)
    return pack(pieces, cutting.sequence_length) if cutting.packing == "documents" else one_per_sample(pieces)


def _bytes(parts: list[PackedSamples]) -> bytes:
    """int64: number of samples, of pieces; offsets, starts, lengths; xxh3 of all that."""
    sizes = np.concatenate([np.empty(0, np.int64), *(np.diff(part.offsets) for part in parts)])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    starts, lengths = (
        np.concatenate([np.empty(0, np.int64), *(getattr(part.pieces, name) for part in parts)])
        for name in ("starts", "lengths")
    )
    content = np.concatenate([[len(sizes), len(starts)], offsets, starts, lengths]).astype("<i8").tobytes()
    return content + xxhash.xxh3_64_digest(content)


def _is_whole(data: bytes) -> bool:
    return xxhash.xxh3_64_digest(data[:-8]) == data[-8:]


def _parsed(data: bytes) -> PackedSamples:
    numbers = np.frombuffer(data, "<i8", len(data) // 8 - 1)
    samples, pieces = int(numbers[0]), int(numbers[1])
    offsets, starts, lengths = np.split(numbers[2:], [samples + 1, samples + 1 + pieces])
    return PackedSamples(Pieces(starts, lengths), offsets)
