"""What a sample is made of: a cut of the stream of tokens, or pieces of documents.

A piece is a run of places that are predicted from the same document: ``start`` is the token (of the stream) that is its
first input, ``length`` the number of its inputs. So a document of n tokens has n - 1 places: its end is predicted, and
predicts nothing. One that has more than a sample is cut into pieces of a whole sample, and a rest.

``documents`` packs pieces by best fit decreasing (as in arXiv:2404.10830), in windows of ``WINDOW`` neighbouring ones:
so a sample reads from few places, and packing costs the same for every document.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[np.int64]]

WINDOW = 1024
"""Pieces that are packed together."""
WINDOWS = 256
"""Windows that are packed side by side: their groups fit into a processor's cache."""
BITS = 10
"""Of the number of a group in its window."""
MASK = 2**BITS - 1
LOOK_AFTER = 32
"""Steps of packing after which is looked how many groups there are."""
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


class ShardSamples:
    """Samples of the shards of a data set, one shard's after those of the ones before; safe to use from threads."""

    def __init__(self, shards: Sequence[tuple[int, PackedSamples]]) -> None:
        """``shards``: first token of each, and its samples, whose pieces are counted from there."""
        self._shards = shards
        self._ends = np.cumsum([len(samples) for _, samples in shards], dtype=np.int64).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sample(self, index: int) -> list[tuple[int, int]]:
        """(start, length) of each piece, in the order of the stream."""
        number = bisect_right(self._ends, index)
        first, samples = self._shards[number]
        pieces = samples.sample(index - (self._ends[number] - len(samples)))
        return [(first + start, length) for start, length in pieces]


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
    group = np.arange(len(pieces.lengths))
    short = np.flatnonzero(pieces.lengths < sequence_length)
    group[short] = len(group) + best_fit(pieces.lengths[short], sequence_length)
    first = np.empty(2 * len(group), np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]  # of several pieces of a group the first one stays
    order = np.argsort(first[group], kind="stable")
    begins = np.flatnonzero(np.diff(first[group[order]], prepend=-1))
    offsets = np.append(begins, len(group)).astype(np.int64)
    return PackedSamples(Pieces(pieces.starts[order], pieces.lengths[order]), offsets)


def best_fit(lengths: Array, room: int) -> Array:
    """Number of the group, int64 below n, of each of ``lengths`` [n]; lengths of a group sum to at most ``room``.

    In each window of ``WINDOW`` lengths the longest first, each into the group that it leaves the least room in; of
    equal ones the first. Windows go side by side, ``WINDOWS`` at a time: numpy finds the groups of all of them at once.
    """
    if not len(lengths):
        return np.empty(0, np.int64)
    windows = -(-len(lengths) // WINDOW)
    width = min(WINDOW, len(lengths))
    padded = np.zeros(windows * width, np.int64)
    padded[: len(lengths)] = lengths
    blocks = np.split(padded.reshape(windows, width), range(WINDOWS, windows, WINDOWS))
    groups = np.concatenate([_best_fit_side_by_side(block, room) for block in blocks])
    return (groups + np.arange(windows)[:, None] * width).ravel()[: len(lengths)]


def _best_fit_side_by_side(lengths_WN: Array, room: int) -> Array:
    """The group of each length, int64 [W, N]. Each group is one number, its room above its own: (room << BITS) + group.

    The least of those that are large enough is the best fit. Less the length, the ones that are too small turn around
    to the largest unsigned numbers; a group without any piece has all the room, so it is taken where no other fits.
    """
    lengths_NW = np.ascontiguousarray(lengths_WN.T)
    width, windows = lengths_NW.shape
    unsigned = np.uint32 if room < 2 ** (30 - BITS) else np.uint64
    rest_NW = room - lengths_NW if room >= 2**16 else (room - lengths_NW).astype(np.uint16)  # which numpy sorts faster
    longest_first = np.argsort(rest_NW, axis=0, kind="stable")
    sorted_NW = np.take_along_axis(lengths_NW << BITS, longest_first, axis=0).astype(unsigned)
    open_NW = np.repeat((np.arange(width) + (room << BITS)).astype(unsigned)[:, None], windows, axis=1)
    left_NW = np.empty_like(open_NW)
    taken_NW = np.empty((width, windows), np.int64)
    each, used = np.arange(windows), 0
    for number, lengths in enumerate(sorted_NW):
        if number % LOOK_AFTER == 0:  # a step opens one more group at most
            latest = taken_NW[max(number - LOOK_AFTER, 0) : number]
            used = max(used, int(latest.max(initial=-1)) + 1 + LOOK_AFTER)
        left = np.subtract(open_NW[:used], lengths, out=left_NW[:used]).min(axis=0)
        taken = taken_NW[number] = left & MASK
        open_NW[taken, each] = left
    groups_NW = np.empty_like(lengths_NW)
    np.put_along_axis(groups_NW, longest_first, taken_NW, axis=0)
    return groups_NW.T
