"""Which documents of the whole input are in the data set, and why the others are not."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from elastic_train.data.scan import KINDS, beginning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_train.data.parts import Part
    from elastic_train.data.scan import Scan

    Hashes = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

DUPLICATE = KINDS.index("duplicate")


class Selection:
    """Of several equal documents the first in order is kept, unless ``keep_duplicates``.

    Takes, with the scans, at most 140 bytes of memory per document of the input.
    """

    def __init__(self, parts: Sequence[Part], scans: Sequence[Scan], keep_duplicates: bool) -> None:
        self._parts, self._scans = parts, scans
        self._starts = np.cumsum([0, *(len(scan) for scan in scans)])
        self.kinds = np.concatenate([scan.kinds for scan in scans])
        """uint8 [documents of the input], numbers of :data:`~elastic_train.data.scan.KINDS`"""
        self._first = np.arange(len(self.kinds))
        if not keep_duplicates:
            usable = np.flatnonzero(self.kinds == 0)
            hashes = np.concatenate([scan.hashes for scan in scans])[usable]
            self._first[usable] = usable[first_copies(hashes["high"], hashes["low"])]
            self.kinds[self._first != np.arange(len(self.kinds))] = DUPLICATE
        self._bases = _lines_before(parts, scans)

    def counts(self) -> dict[str, int]:
        """How many documents are left out, by kind."""
        found = Counter(self.kinds.tolist())
        return {kind: found[number] for number, kind in enumerate(KINDS) if number and found[number]}

    def duplicates(self, part: int) -> list[int]:
        """Numbers in the part of its documents that are copies of earlier ones."""
        return [int(i) for i in np.flatnonzero(self.kinds[self._starts[part] : self._starts[part + 1]] == DUPLICATE)]

    def kept_bytes(self, part: int) -> int:
        """UTF-8 of the part's documents that are in the data set."""
        kept = self.kinds[self._starts[part] : self._starts[part + 1]] == 0
        return int(self._scans[part].sizes[kept].sum())

    def sample(self, sample_bytes: int) -> Iterator[str]:
        """Texts of ``sample_bytes`` for the training of a tokenizer: those with the smallest hashes of what the scans
        have kept for it, the last one cut.
        """
        found: dict[bytes, tuple[int, int]] = {}
        for part, scan in enumerate(self._scans):
            for number in np.flatnonzero(scan.sample.is_valid().to_numpy()):
                found.setdefault(scan.hashes[number].tobytes(), (part, int(number)))
        left = sample_bytes
        for value in sorted(found):
            place, row = found[value]
            data = self._scans[place].sample[row].as_py().encode()
            yield beginning(data, left)
            left -= len(data)
            if left <= 0:
                return

    def left_out(self) -> Iterator[bytes]:
        """A line of JSON for each document that is not in the data set, in order."""
        for number in np.flatnonzero(self.kinds):
            part, place = self._place(int(number))
            if self.kinds[number] == DUPLICATE:
                reason = f"duplicate of {self._name(int(self._first[number]))}"
            else:
                reason = self._scans[part].reasons[place].as_py()
            entry = {"name": self._name(int(number)), "reason": reason}
            yield json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

    def _place(self, number: int) -> tuple[int, int]:
        """(part, number in it) of a document of the input."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return part, number - int(self._starts[part])

    def _name(self, number: int) -> str:
        part, document = self._place(number)
        scan = self._scans[part]
        piece, place = int(scan.slices[document]), int(scan.places[document])
        file = self._parts[part][piece].file
        return f"{file.name}:{self._bases[part][piece] + place}" if place else file.name


def first_copies(high: Hashes, low: Hashes) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """For each of the hashes (two uint64 [n]) the place of the first that equals it."""
    order = np.lexsort((low, high))  # stable: of equal ones the first comes first
    fresh = np.ones(len(order), bool)
    fresh[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    first = np.empty(len(order), np.intp)
    first[order] = order[fresh][np.cumsum(fresh) - 1]
    return first


def _lines_before(parts: Sequence[Part], scans: Sequence[Scan]) -> list[list[int]]:
    """Lines of its file that are before each slice. (Rows of Parquet are counted from the file's first already.)"""
    bases: list[list[int]] = []
    file, count = None, 0
    for part, scan in zip(parts, scans, strict=True):
        bases.append([])
        for piece, lines in zip(part, scan.lines, strict=True):
            count = count if piece.file == file and piece.file.format != "parquet" else 0
            file = piece.file
            bases[-1].append(count)
            count += lines
    return bases
