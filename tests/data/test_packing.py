from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data import packing
from elastic_train.data.packing import WINDOW, PackedSamples, Pieces, StreamSamples, best_fit, cut, one_per_sample, pack

DOCUMENTS = st.lists(st.integers(1, 60), max_size=60)


def pieces_of(sizes: list[int], length: int, tails: str) -> Pieces:
    ends = np.array(list(accumulate(sizes)), np.int64)
    begins = ends - np.array(sizes, np.int64)
    return cut(begins, ends, length, "keep" if tails == "keep" else "drop")


def by_hand(sizes: list[int], length: int, tails: str) -> list[tuple[int, int]]:
    """What ``cut`` gives, document by document."""
    pieces, begin = [], 0
    for size in sizes:
        places = size - 1
        for first in range(0, places, length):
            piece = min(length, places - first)
            if piece == length or first == 0 or tails == "keep":
                pieces.append((begin + first, piece))
        begin += size
    return pieces


@given(DOCUMENTS, st.integers(1, 20), st.sampled_from(["keep", "drop"]))
def test_documents_are_cut_into_pieces_of_a_sample_and_a_rest(sizes: list[int], length: int, tails: str) -> None:
    pieces = pieces_of(sizes, length, tails)
    expected = by_hand(sizes, length, tails)
    assert list(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)) == expected
    single = one_per_sample(pieces)
    assert [single.sample(index) for index in range(len(single))] == [[piece] for piece in expected]


@given(DOCUMENTS, st.integers(1, 20), st.sampled_from(["keep", "drop"]))
def test_every_piece_is_packed_once_and_none_is_cut(sizes: list[int], length: int, tails: str) -> None:
    pieces = pieces_of(sizes, length, tails)
    packed = pack(pieces, length)
    samples = [packed.sample(index) for index in range(len(packed))]
    assert sorted(piece for sample in samples for piece in sample) == by_hand(sizes, length, tails)
    assert all(sum(size for _, size in sample) <= length for sample in samples)
    assert all(sample == sorted(sample) for sample in samples)
    assert samples == sorted(samples)
    # No two samples could have been one: the pieces of a window fit nowhere else.
    rooms = sorted(sum(size for _, size in sample) for sample in samples)
    assert len(rooms) < 2 or rooms[0] + rooms[1] > length


def groups_of(lengths: list[int], room: int) -> list[list[int]]:
    groups = best_fit(np.array(lengths, np.int64), room)
    return sorted(np.flatnonzero(groups == group).tolist() for group in set(groups.tolist()))


def test_the_best_fitting_group_is_taken() -> None:
    assert groups_of([3, 7, 6, 4, 2], 10) == [[0, 1], [2, 3], [4]]
    assert groups_of([5, 5, 5], 10) == [[0, 1], [2]]
    assert groups_of([], 10) == []


def one_by_one(lengths: list[int], room: int) -> list[list[int]]:
    """Best fit decreasing of one window, as a textbook has it."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        left = [room - sum(lengths[member] for member in group) - lengths[index] for group in groups]
        fitting = [(rest, number) for number, rest in enumerate(left) if rest >= 0]
        if fitting:
            groups[min(fitting)[1]].append(index)
        else:
            groups.append([index])
    return sorted(sorted(group) for group in groups)


@pytest.mark.parametrize(
    ("count", "room"), [(900, 64), (WINDOW, 1024), (2 * WINDOW + 5, 200), (300, 2**17), (40, 2**31)]
)
def test_windows_side_by_side_are_packed_as_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, count: int, room: int
) -> None:
    monkeypatch.setattr(packing, "WINDOWS", 2)
    lengths = (np.random.default_rng(count).random(count) ** 3 * (room - 1)).astype(int) + 1
    expected: list[list[int]] = []
    for start in range(0, count, WINDOW):
        window = lengths[start : start + WINDOW].tolist()
        expected += [[start + member for member in group] for group in one_by_one(window, room)]
    assert groups_of(lengths.tolist(), room) == sorted(expected)


def test_packing_wastes_little() -> None:
    """Documents of a log-normal length, as texts have: samples are filled to more than 97 percent."""
    sizes = np.random.default_rng(1).lognormal(5, 1, 5000).astype(int) + 2
    pieces = pieces_of(sizes.tolist(), 1024, "keep")
    packed = pack(pieces, 1024)
    assert pieces.lengths.sum() > 0.97 * 1024 * len(packed)


def test_a_sample_has_neighbours_only() -> None:
    pieces = pieces_of([11] * 5000, 64, "keep")
    packed = pack(pieces, 64)
    for index in range(len(packed)):
        starts = [start for start, _ in packed.sample(index)]
        assert starts[-1] - starts[0] < 11 * 1024


@pytest.mark.parametrize(("tokens", "keep", "drop"), [(0, 0, 0), (1, 0, 0), (2, 1, 0), (9, 1, 1), (10, 2, 1)])
def test_the_rest_of_a_stream(tokens: int, keep: int, drop: int) -> None:
    kept, dropped = StreamSamples(tokens, 8, "keep"), StreamSamples(tokens, 8, "drop")
    assert (len(kept), len(dropped)) == (keep, drop)
    assert [kept.sample(index) for index in range(drop)] == [dropped.sample(index) for index in range(drop)]
    if tokens == 10:
        assert [kept.sample(index) for index in range(2)] == [[(0, 8)], [(8, 1)]]


def test_no_documents() -> None:
    empty = np.array([], np.int64)
    assert len(pack(cut(empty, empty, 8, "keep"), 8)) == 0
    assert len(one_per_sample(pieces_of([1, 1], 8, "keep"))) == 0
    assert isinstance(pack(pieces_of([9], 8, "keep"), 8), PackedSamples)
