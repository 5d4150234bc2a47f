"""The input cut into parts: which task reads what depends on the files alone, never on how many workers there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.data.parquet import row_groups
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from elastic_train.data.corpus import Corpus, InputFile

PART_BYTES = 64 * 2**20
LISTING_THREADS = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of one file.

    ``[begin, end)`` are bytes, of Parquet the row groups. A line belongs to the slice in which it begins. ``rows``: how
    many rows of a Parquet file are before it. ``size``: bytes, for progress and for cutting.
    """

    file: InputFile
    begin: int
    end: int
    size: int
    rows: int = 0


Part = tuple[Slice, ...]


def cut(corpus: Corpus, part_bytes: int) -> list[Part]:
    """Consecutive slices of about ``part_bytes``; more where a file cannot be cut: text, and what is compressed."""
    stores = {uri: Store.open(uri, corpus.storage) for uri in {file.store for file in corpus.files}}

    def slices_of(file: InputFile) -> list[Slice]:
        return _slices(stores[file.store], corpus.column, file, part_bytes)

    with ThreadPoolExecutor(LISTING_THREADS) as pool:  # Parquet files are asked for their row groups
        slices = [piece for pieces in pool.map(slices_of, corpus.files) for piece in pieces]
    parts: list[Part] = []
    held: list[Slice] = []
    size = 0
    for piece in slices:
        if held and size + piece.size > part_bytes:
            parts.append(tuple(held))
            held, size = [], 0
        held.append(piece)
        size += piece.size
    return [*parts, tuple(held)]


def _slices(store: Store, column: str, file: InputFile, part_bytes: int) -> list[Slice]:
    if file.format == "parquet":
        groups = row_groups(store, file, column)
        return [Slice(file, number, number + 1, size, rows) for number, (rows, size) in enumerate(groups)]
    if file.format == "text" or file.compression is not None:
        return [Slice(file, 0, file.size, file.size)]
    starts = range(0, file.size, part_bytes)
    return [
        Slice(file, start, min(start + part_bytes, file.size), min(part_bytes, file.size - start)) for start in starts
    ]
