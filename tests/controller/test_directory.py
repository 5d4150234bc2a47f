from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.controller.directory import SPREAD, Directory

ROWS, COLUMNS = 12, 6


def held(*boxes: tuple[str, tuple[int, int], tuple[int, int]]) -> Description:
    """(key, rows, columns), each as (begin, end)."""
    chunks = [
        Chunk(key, "float32", (ROWS, COLUMNS), (r[0], c[0]), (r[1] - r[0], c[1] - c[0]), 0, 4) for key, r, c in boxes
    ]
    return Description(tuple(chunks), 4)


def cells(description: Description) -> set[tuple[str, int, int]]:
    return {
        (chunk.key, row, column)
        for chunk in description.chunks
        for row, column in product(
            range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]),
            range(chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1]),
        )
    }


intervals = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(lambda x: (x[0], min(x[0] + x[1], ROWS)))
columns = st.tuples(st.integers(0, COLUMNS - 1), st.integers(1, 3)).map(lambda x: (x[0], min(x[0] + x[1], COLUMNS)))
boxes = st.lists(st.tuples(st.sampled_from("vw"), intervals, columns), max_size=4).map(lambda found: held(*found))


@settings(max_examples=300)
@given(
    old=st.lists(boxes, min_size=1, max_size=8),
    needs=boxes,
    rank=st.integers(0, 20),
    near=st.sets(st.integers(0, 7)),
    gone=st.sets(st.integers(0, 7)),
)
def test_what_anybody_has_is_found_and_nobody_is_asked_in_vain(
    old: list[Description], needs: Description, rank: int, near: set[int], gone: set[int]
) -> None:
    directory = Directory()
    for number, description in enumerate(old):
        directory.add(number, description.to_json())
    near &= set(range(len(old))) - gone
    chosen = directory.holders(needs, rank, near, lambda number: number not in gone)
    assert not chosen & gone
    assert all(cells(old[number]) & cells(needs) for number in chosen)
    wanted = cells(needs)
    there = set().union(*(cells(d) & wanted for number, d in enumerate(old) if number not in gone))
    assert set().union(*(cells(old[number]) & wanted for number in chosen)) == there
    assert {number for number in near if cells(old[number]) & wanted} <= chosen  # the nearest copies are read first


def test_of_many_replicas_a_few_are_named_and_not_the_same_to_all() -> None:
    directory = Directory()
    whole = held(("w", (0, ROWS), (0, COLUMNS)))
    for rank in range(1000):
        directory.add(rank, whole.to_json())
    named = [directory.holders(whole, rank, (), lambda number: True) for rank in range(1000)]
    assert {len(ranks) for ranks in named} == {1}  # they are one group: equal in everything
    assert len(set().union(*named)) == 1000
    assert directory.holders(whole, 5, [7, 8], lambda number: True) == {5, 7, 8}


def test_of_a_part_that_ranks_with_different_rests_hold_some_are_named() -> None:
    directory = Directory()
    for rank in range(ROWS):
        directory.add(rank, held(("w", (rank, rank + 1), (0, COLUMNS)), ("norm", (0, 1), (0, 1))).to_json())
    needs = held(("norm", (0, 1), (0, 1)))
    named = [directory.holders(needs, rank, (), lambda number: True) for rank in range(ROWS)]
    assert {len(ranks) for ranks in named} == {SPREAD}
    assert set().union(*named) == set(range(ROWS))
    assert directory.holders(needs, 3, (), lambda number: number == 0) == {0}


def test_a_scalar_is_found() -> None:
    scalar = Description((Chunk("step", "int64", (), (), (), 0, 8),), 64)
    directory = Directory()
    directory.add(4, scalar.to_json())
    assert directory.holders(scalar, 0, (), lambda number: True) == {4}
    assert directory.holders(held(("other", (0, 1), (0, 1))), 0, (), lambda number: True) == set()
