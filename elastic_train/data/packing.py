"""What a sample is made of: a cut of the stream of tokens, or pieces of documents.

A piece is a run of places that are predicted from the same document: ``start`` is the token (of the stream) that is its
first input, ``length`` the number of its inputs. So a document of n tokens has n - 1 places: its end is predicted, and
predicts nothing. One that has more than a sample is cut into pieces of a whole sample, and a rest.

``documents`` packs pieces by best fit decreasing (as in arXiv:2404.10830), in windows of ``WINDOW`` neighbouring ones:
so a sample reads from few places, and packing costs the same for every document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    Array = np.ndarray[Any, np.dtype[np.int64]]

WINDOW = 1024
"""Pieces that are packed together."""
Packing = Literal["stream", "documents", "none"]
Tails = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How samples are made of a data set: fields of ``data`` in a job."""

    sequence_length: int
    packing: Packing = "stream"
    tails: Tails = "drop"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of places, int64 ``starts`` and ``lengths`` (1 or more each)."""

    starts: Array
    lengths: Array


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """Samples as groups of pieces: sample i has the pieces ``offsets[i]`` to ``offsets[i + 1]``."""

    pieces: Pieces
    offsets: Array

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, index: int) -> list[tuple[int, int]]:
        """(start, length) of each piece, in the order of the stream."""
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        starts, lengths = self.pieces.starts[first:last].tolist(), self.pieces.lengths[first:last].tolist()
        return list(zip(starts, lengths, strict=True))


class StreamSamples:
    """Sample i begins at token i x T, and documents are what they happen to be. The rest is shorter, if it is kept."""

    def __init__(self, tokens: int, sequence_length: int, tails: Tails) -> None:
        self._places, self._length = max(tokens - 1, 0), sequence_length
        whole, rest = divmod(self._places, sequence_length)
        self._samples = whole + (tails == "keep" and rest > 0)

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int) -> list[tuple[int, int]]:
        """(start, length) of its only piece."""
        start = index * self._length
        return [(start, min(self._length, self._places - start))]


def cut(begins: Array, ends: Array, sequence_length: int, tails: Tails) -> Pieces:
    """Pieces of the documents at tokens ``[begins, ends)``, in the order of the stream.

    A document of one token has none. What is left of a cut document is dropped, if ``tails`` says so.
    """
    places = ends - begins - 1
    whole, rest = np.divmod(places, sequence_length)
    keeps_rest = rest > 0 if tails == "keep" else (rest > 0) & (whole == 0)
    counts = whole + keeps_rest
    owner = np.repeat(np.arange(len(begins)), counts)
    first = np.cumsum(counts) - counts
    before = (np.arange(len(owner)) - first[owner]) * sequence_length
    return Pieces(begins[owner] + before, np.minimum(sequence_length, places[owner] - before))


def one_per_sample(pieces: Pieces) -> PackedSamples:
    """Every piece is a sample."""
    return PackedSamples(pieces, np.arange(len(pieces.starts) + 1))


def pack(pieces: Pieces, sequence_length: int) -> PackedSamples:
    """Samples of one or more pieces, in the order of their first ones; no piece is cut."""
    groups: list[list[int]] = [[index] for index in np.flatnonzero(pieces.lengths == sequence_length).tolist()]
    short = np.flatnonzero(pieces.lengths < sequence_length)
    for start in range(0, len(short), WINDOW):
        window = short[start : start + WINDOW]
        for group in best_fit(pieces.lengths[window].tolist(), sequence_length):
            groups.append(window[sorted(group)].tolist())
    groups.sort(key=lambda group: group[0])
    order = np.fromiter(_flat(groups), np.int64)
    offsets = np.cumsum([0, *map(len, groups)], dtype=np.int64)
    return PackedSamples(Pieces(pieces.starts[order], pieces.lengths[order]), offsets)


def _flat(groups: list[list[int]]) -> Iterator[int]:
    for group in groups:
        yield from group


def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Groups of indices of ``lengths`` whose sums are at most ``room``.

    The longest first, each into the group that it leaves the least room in; of equal ones the first.
    """
    groups: list[list[int]] = []
    open_groups: list[tuple[int, int]] = []  # (room left, group), rising
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect_left(open_groups, (lengths[index], -1))
        if place == len(open_groups):
            left, group = room, len(groups)
            groups.append([])
        else:
            left, group = open_groups.pop(place)
        groups[group].append(index)
        if left > lengths[index]:
            insort(open_groups, (left - lengths[index], group))
    return groups
