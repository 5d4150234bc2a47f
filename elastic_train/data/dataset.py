"""Samples of a prepared data set: sequences of tokens, memory-mapped."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.cache import ShardCache
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Manifest, read_manifest
from elastic_train.data.shards import MappedShard, read_blocks
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from elastic_train.config.operation import StorageConfig


class TokenDataset:
    """The token stream of all shards, cut into samples.

    Sample ``i`` is the tokens ``[i * T, i * T + T + 1)`` for sequence length T: inputs and, shifted by one, labels. So
    there are ``(tokens - 1) // T`` samples and every token but a rest of less than T is predicted once.
    """

    def __init__(self, manifest: Manifest, digest: str, files: list[Path], sequence_length: int) -> None:
        """``files`` holds the shards of ``manifest`` in order; ``digest`` is the sha256 of the manifest file."""
        if sequence_length < 1:
            raise DataError(f"sequence_length={sequence_length} must be at least 1")
        self.manifest = manifest
        self.digest = digest
        self.sequence_length = sequence_length
        self.files = files
        self._shards = [
            MappedShard(file, shard, manifest.dtype, manifest.batch_tokens)
            for file, shard in zip(files, manifest.shards, strict=True)
        ]
        self._ends = list(accumulate(shard.tokens for shard in manifest.shards))

    @classmethod
    def open(
        cls, uri: str, sequence_length: int, storage: StorageConfig | None = None, cache_dir: str | Path | None = None
    ) -> TokenDataset:
        """Opens the data set in the folder ``uri`` (``storage`` has the S3 endpoint).

        Shards in S3 are first copied to ``cache_dir`` (default ``~/.cache/elastic_train/shards``), which all processes
        of a node share; their sha256 is checked on the way. Local shards are mapped where they are; :meth:`verify`
        checks them.
        Raises :class:`DataError` or :class:`~elastic_train.storage.errors.StorageError`.
        """
        store = Store.open(uri, storage)
        manifest, digest = read_manifest(store)
        cache = ShardCache(cache_dir)
        files = [store.local_path(shard.path) or cache.fetch(store, shard) for shard in manifest.shards]
        return cls(manifest, digest, files, sequence_length)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every token is below it."""
        return self.manifest.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The token that ends every document."""
        return self.manifest.tokenizer.eos_id

    def __len__(self) -> int:
        return max(self.manifest.tokens - 1, 0) // self.sequence_length

    def sample(self, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """int64 [T + 1]; ``IndexError`` outside ``range(len(self))``."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside the {len(self)} samples")
        return self.tokens(index * self.sequence_length, self.sequence_length + 1)

    def tokens(self, start: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Tokens ``[start, start + count)`` of the stream, int64 [count].

        Raises :class:`DataError` where one is none of the tokenizer's: it would be trained on as if it were.
        """
        if start < 0 or count < 0 or start + count > self.manifest.tokens:
            raise IndexError(f"tokens {start} to {start + count} are outside the {self.manifest.tokens} tokens")
        out = np.empty(count, np.int64)
        done = 0
        number = bisect_right(self._ends, start)
        while done < count:
            begin = self._ends[number] - self.manifest.shards[number].tokens
            piece = out[done : done + self._ends[number] - start - done]
            self._shards[number].copy(start + done - begin, piece)
            done += len(piece)
            number += 1
        if count and out.max() >= self.vocab_size:
            files = ", ".join(str(file) for file in self.files[bisect_right(self._ends, start) : number])
            raise DataError(f"{files} has the token {out.max()}, the tokenizer only {self.vocab_size}: it is damaged")
        return out

    def verify(self) -> None:
        """Hashes every shard; :class:`DataError` names the first that is not what the manifest says."""
        for file, shard in zip(self.files, self.manifest.shards, strict=True):
            digest = hashlib.sha256()
            for block in read_blocks(file):
                digest.update(block)
            if digest.hexdigest() != shard.sha256:
                raise DataError(
                    f"shard {file} is damaged: sha256 {digest.hexdigest()}, the manifest says {shard.sha256}"
                )
