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
from elastic_train.data.samples import PADDING_LABEL, Sample, Slot, padding
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        self._count = len(self._samples)
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
        return self._count

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(first input's place in the stream, number of inputs) of each run of a sample; what is left is padding."""
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} is outside the {self._count} samples")
        return self._samples.sample(index)

    def samples(self, indices: Sequence[int]) -> Slot:
        """The samples as rows; ``IndexError`` outside ``range(len(self))``. Inputs and labels may share memory.

        Padding, and tokens that are not to be learned, have the label :data:`PADDING_LABEL`.
        Raises :class:`DataError` for what is damaged, StorageError where the store does not answer.
        """
        rows, length = [self.pieces(index) for index in indices], self.cutting.sequence_length
        if all(pieces[0][1] == length for pieces in rows):
            return self._read([pieces[0][0] for pieces in rows], length)
        padded = padding(len(rows), length)
        for row, pieces in enumerate(rows):
            self._fill(Sample(*(array[row] for array in padded)), pieces)
        return padded

    def sample(self, index: int) -> Sample:
        """As ``samples``, of one."""
        return Sample(*(array[0] for array in self.samples([index])))

    def prefetch(self, indices: Sequence[int]) -> None:
        """Have what samples need read in the background: each of them will be asked for once, soon."""
        self._reader.prefetch(self._tokens_of(indices))

    def forget(self, indices: Sequence[int]) -> None:
        """They will not be asked for, after all."""
        self._reader.forget(self._tokens_of(indices))

    def _tokens_of(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """(first, number) of the tokens that samples need."""
        return [(start, length + 1) for index in indices for start, length in self.pieces(index)]

    def tokens(self, start: int, count: int) -> Tokens:
        """Tokens ``[start, start + count)`` of the stream, int64 [count]. Raises as :meth:`sample`."""
        tokens = np.empty(count, np.int64)
        self._reader.read(start, tokens)
        return tokens

    def _fill(self, sample: Sample, pieces: list[tuple[int, int]]) -> None:
        """Puts pieces into a sample of padding, one behind the other."""
        place = number = 0
        for start, length in pieces:
            run = slice(place, place + length)
            piece = self._read([start], length)
            sample.input_ids[run], sample.labels[run] = piece.input_ids[0], piece.labels[0]
            sample.documents[run] = piece.documents[0] + number
            place, number = place + length, int(sample.documents[place + length - 1]) + 1
        sample.documents[place:] = number

    def _read(self, starts: list[int], length: int) -> Slot:
        """``length`` inputs from each of ``starts`` on, as rows. Of a stream the documents are those that end in it,
        where anybody wants to know.
        """
        tokens = np.empty((len(starts), length + 1), np.int64)
        counts = np.empty(tokens.shape, np.uint8) if self.manifest.labelled else None
        for row, start in enumerate(starts):
            self._reader.read(start, tokens[row], None if counts is None else counts[row])
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if counts is not None:
            labels = np.where(counts[:, 1:] == 0, PADDING_LABEL, labels)
        documents = np.zeros(inputs.shape, np.int64)
        if self._ends is not None:
            for row, start in enumerate(starts):
                documents[row] = self._ends.numbers(start, inputs[row])
        return Slot(inputs, labels, documents)


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
