"""Samples of a prepared data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.batch_memory import BatchMemory
from elastic_train.data.cache import DEFAULT_BYTES, BatchCache, default_folder
from elastic_train.data.document_ends import DocumentEnds
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import read_manifest
from elastic_train.data.pack_index import samples_of
from elastic_train.data.packing import Cutting
from elastic_train.data.reader import TokenReader
from elastic_train.data.samples import PADDING_LABEL, Sample, padding
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.config.data import DataConfig
    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.manifest import Manifest
    from elastic_train.data.packing import Packing, Tails
    from elastic_train.data.samples import Tokens


class TokenDataset:
    """The tokens of all shards, cut or packed into samples of ``sequence_length`` inputs and their next tokens."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        digest: str,
        cutting: Cutting,
        cache: BatchCache,
        memory: BatchMemory,
        numbers_documents: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``digest``: sha256 of the manifest file. Otherwise as :meth:`open`."""
        if cutting.sequence_length < 1:
            raise DataError(f"sequence_length={cutting.sequence_length} must be at least 1")
        self.manifest = manifest
        self.digest = digest
        self.cutting = cutting
        self._samples = samples_of(store, manifest, digest, cutting, cache, on_progress)
        self._ends = DocumentEnds(store, manifest, cache) if cutting.packing == "stream" and numbers_documents else None
        self._reader = TokenReader(store, manifest, cache, memory)

    @classmethod
    def open(
        cls,
        uri: str,
        sequence_length: int,
        storage: StorageConfig | None = None,
        cache_dir: str | Path | None = None,
        *,
        packing: Packing = "stream",
        tails: Tails = "drop",
        cache_bytes: int = DEFAULT_BYTES,
        numbers_documents: bool = True,
        memory: BatchMemory | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> TokenDataset:
        """Opens the data set in the folder ``uri`` (``storage`` has the S3 endpoint): its manifest, and no shard.

        Record batches of shards in S3 are fetched when they are needed, checked, and kept in ``cache_dir`` (default
        ``~/.cache/elastic_train/data``, at most ``cache_bytes``), which all processes of a node share. Packing by
        documents reads where they end, once per node; a cut of the stream does when a sample first needs it, and
        without ``numbers_documents`` it counts as one document. ``on_progress``
        is called while that goes on. ``memory``: for batches, of several data sets together; None: one of its own.
        Raises :class:`DataError` or :class:`~elastic_train.storage.errors.StorageError`.
        """
        store = Store.open(uri, storage)
        manifest, digest = read_manifest(store)
        cache = BatchCache(Path(cache_dir) if cache_dir else default_folder(), cache_bytes)
        cutting = Cutting(sequence_length, packing, tails)
        return cls(store, manifest, digest, cutting, cache, memory or BatchMemory(), numbers_documents, on_progress)

    @property
    def sequence_length(self) -> int:
        """Inputs of a sample."""
        return self.cutting.sequence_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every token is below it."""
        return self.manifest.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The token that ends every document."""
        return self.manifest.tokenizer.eos_id

    def __len__(self) -> int:
        return len(self._samples)

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first input's place in the stream, number of inputs) of each run of a sample; what is left is padding."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside the {len(self)} samples")
        return self._samples.sample(index)

    def sample(self, index: int) -> Sample:
        """The sample; ``IndexError`` outside ``range(len(self))``. Inputs and labels may share memory.

        Padding, and tokens that are not to be learned, have the label :data:`PADDING_LABEL`.
        Raises :class:`DataError` for what is damaged, StorageError where the store does not answer.
        """
        pieces = self.pieces(index)
        if pieces[0][1] == self.sequence_length:
            inputs, labels = self._inputs_and_labels(*pieces[0])
            return Sample(inputs, labels, self._numbered(pieces[0][0], inputs))
        sample = padding(self.sequence_length)
        place = number = 0
        for start, length in pieces:
            run = slice(place, place + length)
            sample.input_ids[run], sample.labels[run] = self._inputs_and_labels(start, length)
            sample.documents[run] = self._numbered(start, sample.input_ids[run]) + number
            place, number = place + length, int(sample.documents[place + length - 1]) + 1
        sample.documents[place:] = number
        return sample

    def prefetch(self, index: int) -> None:
        """Have what a sample needs read in the background: it will be asked for soon."""
        for start, length in self.pieces(index):
            self._reader.prefetch(start, length + 1)

    def tokens(self, start: int, count: int) -> Tokens:
        """Tokens ``[start, start + count)`` of the stream, int64 [count]. Raises as :meth:`sample`."""
        tokens = np.empty(count, np.int64)
        self._reader.read(start, tokens)
        return tokens

    def _inputs_and_labels(self, start: int, length: int) -> tuple[Tokens, Tokens]:
        tokens = np.empty(length + 1, np.int64)
        counts = np.empty(length + 1, np.uint8) if self.manifest.labelled else None
        self._reader.read(start, tokens, counts)
        return tokens[:-1], tokens[1:] if counts is None else np.where(counts[1:] == 0, PADDING_LABEL, tokens[1:])

    def _numbered(self, start: int, inputs: Tokens) -> Tokens:
        """Documents of a piece: of a stream those that end in it, where anybody wants to know."""
        return np.zeros(len(inputs), np.int64) if self._ends is None else self._ends.numbers(start, inputs)


def open_dataset(
    uri: str,
    config: DataConfig,
    storage: StorageConfig,
    memory: BatchMemory | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """The data set in ``uri``, with samples as ``data`` of a job wants them. Raises as :meth:`TokenDataset.open`."""
    return TokenDataset.open(
        uri,
        config.sequence_length,
        storage,
        packing=config.packing,
        tails=config.tail_policy,
        cache_bytes=config.cache_bytes,
        numbers_documents=config.separates_documents,
        memory=memory,
        on_progress=on_progress,
    )
