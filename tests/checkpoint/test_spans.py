from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from elastic_train.checkpoint.description import Chunk
from elastic_train.checkpoint.spans import Piece, no_larger, piece_bytes, runs_of, span, within, without_gaps


def some_box(rng: random.Random) -> tuple[Chunk, Piece, np.ndarray]:
    """A chunk of 4-byte elements, a box of it, and for each byte of the chunk its number."""
    sizes = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 4)))
    lengths = tuple(rng.randint(1, n) for n in sizes)
    offsets = tuple(rng.randint(0, n - length) for n, length in zip(sizes, lengths, strict=True))
    nbytes = int(np.prod(sizes, dtype=np.int64)) * 4
    chunk = Chunk("w", "float32", sizes, (0,) * len(sizes), sizes, 0, nbytes)
    return chunk, Piece(offsets, offsets, lengths), np.arange(nbytes).reshape(*sizes, 4)


def bytes_of(piece: Piece, numbers: np.ndarray) -> list[int]:
    places = zip(piece.source_offsets, piece.lengths, strict=True)
    return numbers[tuple(slice(o, o + n) for o, n in places)].ravel().tolist()


@pytest.mark.parametrize("seed", range(300))
def test_runs_are_the_bytes_of_the_box_and_its_span_holds_them(seed: int) -> None:
    chunk, piece, numbers = some_box(random.Random(seed))
    wanted = bytes_of(piece, numbers)
    runs = runs_of(chunk, piece)
    found = [b + i for run in runs for b in range(run.begin, run.end, run.stride) for i in range(run.length)]
    assert found == wanted
    assert span(chunk, piece) == (min(wanted), max(wanted) + 1)
    assert piece_bytes(chunk, piece) == len(wanted)
    assert all(run.stride >= run.length for run in runs)
    assert all(before.end <= after.begin for before, after in itertools.pairwise(runs))


@pytest.mark.parametrize("seed", range(300))
def test_boxes_are_cut_where_gaps_or_limits_say(seed: int) -> None:
    rng = random.Random(seed)
    chunk, piece, numbers = some_box(rng)
    wanted = bytes_of(piece, numbers)
    gap = rng.choice([0, 8, 40, 10**6])
    parts = list(without_gaps(chunk, piece, gap))
    assert [b for part in parts for b in bytes_of(part, numbers)] == wanted
    steps = np.diff(wanted)
    assert len(parts) == 1 + int((steps > gap + 1).sum())
    limit, most = rng.choice([4, 12, 100, 10**6]), rng.choice([1, 2, 5, 10**6])
    parts = list(no_larger(chunk, piece, limit, most))
    assert [b for part in parts for b in bytes_of(part, numbers)] == wanted
    assert all(piece_bytes(chunk, part) <= limit and len(runs_of(chunk, part)) <= most for part in parts)
    assert all(part.target_offsets == part.source_offsets for part in parts)


@pytest.mark.parametrize("seed", range(300))
def test_windows_of_bytes_share_out_the_elements_of_a_box(seed: int) -> None:
    rng = random.Random(seed)
    chunk, piece, numbers = some_box(rng)
    window = rng.choice([4, 6, 12, 32, 100, 10**6])
    begin, end = span(chunk, piece)
    found = []
    for first in range(begin // window * window, end, window):
        for part in within(chunk, piece, first, first + window):
            start, stop = span(chunk, part)
            assert first <= start < first + window
            assert stop < first + window + 4  # an element that is cut is where it begins
            assert part.target_offsets == part.source_offsets
            found += bytes_of(part, numbers)
    assert found == bytes_of(piece, numbers)
