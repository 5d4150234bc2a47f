"""Reading every byte of a data set and comparing it with what the manifest says."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import MANIFEST
from elastic_train.data.record_batches import read_ends
from elastic_train.data.tokenizer import GivenTokenizer, number_of_entries, parse_tokenizer
from elastic_train.storage.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elastic_train.data.manifest import Manifest, Shard, Tokenizer
    from elastic_train.storage.store import Store

BLOCK = 8 * 2**20


def total_bytes(manifest: Manifest) -> int:
    """What :func:`damages` reads, without the tokenizer, whose size is not known."""
    shards = sum(shard.bytes + (shard.ends.bytes if shard.ends else 0) for shard in manifest.shards)
    return shards + (manifest.left_out.bytes if manifest.left_out else 0)


def damages(store: Store, manifest: Manifest, read: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """A sentence for everything that is not as the manifest says: file, batch and byte range.

    What seems damaged is read again: bytes may be spoilt on the way. ``read`` is called with sizes as they are read.
    Raises StorageError where the store does not answer, DataError where the manifest is not one.
    """
    documents = sum(shard.documents for shard in manifest.shards)
    if documents != manifest.documents:
        yield f"{store.uri}/{MANIFEST} says documents={manifest.documents}, but its shards have {documents}"
    yield from _of_tokenizer(store, manifest.tokenizer)
    for shard in manifest.shards:
        if list(_of_shard(store, shard, read)):
            yield from _of_shard(store, shard)
        if shard.ends is not None:
            try:
                read_ends(store, shard)
            except DataError as error:
                yield str(error)
            read(shard.ends.bytes)
    if manifest.left_out is not None:
        yield from _of_file(store, manifest.left_out.path, manifest.left_out.sha256)
        read(manifest.left_out.bytes)


def _of_tokenizer(store: Store, told: Tokenizer) -> Iterator[str]:
    wrong = list(_of_file(store, told.path, told.sha256))
    yield from wrong
    if wrong:
        return
    given = GivenTokenizer(store.read(told.path), told.eos_id)
    try:
        tokenizer, entries = parse_tokenizer(given), number_of_entries(given)
    except DataError as error:
        yield f"{store.uri}/{told.path}: {error}"
        return
    here = f"{store.uri}/{MANIFEST} says tokenizer"
    if entries != told.vocab_size:
        yield f"{here}.vocab_size={told.vocab_size}, but the tokenizer has {entries} entries"
    if (name := tokenizer.id_to_token(told.eos_id)) != told.eos_token:
        yield f"{here}.eos_id={told.eos_id} and eos_token={told.eos_token}, but entry {told.eos_id} is {name}"


def _of_file(store: Store, path: str, sha256: str) -> Iterator[str]:
    try:
        found = [hashlib.sha256(store.read(path)).hexdigest() for _ in range(2)]
    except NotFound:
        yield f"file {store.uri}/{path} is missing"
        return
    if sha256 not in found:
        yield f"file {store.uri}/{path} is damaged: sha256 {found[0]}, the manifest says {sha256}"


def _of_shard(store: Store, shard: Shard, read: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    name = f"shard {store.uri}/{shard.path}"
    try:
        size = store.size(shard.path)
    except NotFound:
        yield f"{name} is missing"
        return
    if size != shard.bytes:
        yield f"{name} has {size} bytes, the manifest says {shard.bytes}"
        return
    digest, batches, wrong = hashlib.sha256(), _BatchHashes(shard), 0
    for offset in range(0, size, BLOCK):
        block = store.read(shard.path, offset, min(BLOCK, size - offset))
        digest.update(block)
        for sentence in batches.update(block):
            wrong += 1
            yield f"{name} is damaged: {sentence}"
        read(len(block))
    if not wrong and digest.hexdigest() != shard.sha256:
        where = " outside its batches" if shard.checksums else ""
        yield f"{name} is damaged{where}: sha256 {digest.hexdigest()}, the manifest says {shard.sha256}"


class _BatchHashes:
    """Takes a shard's bytes in order, and tells of each batch that is not right as it ends."""

    def __init__(self, shard: Shard) -> None:
        self._batches = list(zip(shard.batches, shard.checksums, strict=False))
        self._position = self._number = 0
        self._open = xxhash.xxh3_64()

    def update(self, block: bytes) -> Iterator[str]:
        """Sentences: batch, byte range, what was expected and found."""
        view, end_of_block = memoryview(block), self._position + len(block)
        while self._number < len(self._batches):
            (begin, size), expected = self._batches[self._number]
            self._open.update(view[max(begin - self._position, 0) : max(begin + size - self._position, 0)])
            if begin + size > end_of_block:
                break
            if self._open.hexdigest() != expected:
                yield (
                    f"batch {self._number} (bytes {begin} to {begin + size}), xxh3 {self._open.hexdigest()}, the "
                    f"manifest says {expected}"
                )
            self._open.reset()
            self._number += 1
        self._position = end_of_block
