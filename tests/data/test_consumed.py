from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config.training import TrainingConfig
from elastic_train.data.batches import StepBatches, slots_of
from elastic_train.data.consumed import add_digests, batch_digest, covered
from elastic_train.data.order import SampleOrder
from elastic_train.data.samples import Sample, Slot
from tests.samples import OneByOne

SLOTS = 8


class Random(OneByOne):
    """Samples that are all different."""

    sequence_length = 4

    def __len__(self) -> int:
        return 50

    def sample(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, 1000, 5)
        return Sample(tokens[:-1], tokens[1:], np.zeros(4, np.int64))


BATCHES = StepBatches(Random(), SampleOrder(50, 1), TrainingConfig(steps=100, global_batch=SLOTS))


def of_ranks(step: int, data_ranks: int) -> str:
    """A step's digest as so many data ranks make it."""
    ranks = (slots_of(rank, data_ranks, SLOTS) for rank in range(data_ranks))
    return add_digests(batch_digest(slots, BATCHES.load(step, slots)) for slots in ranks)


def test_is_the_same_for_any_number_of_data_ranks() -> None:
    assert {of_ranks(3, ranks) for ranks in range(1, SLOTS + 1)} == {of_ranks(3, 1)}
    assert len({of_ranks(step, 1) for step in range(1, 101)}) == 100


@given(
    slot=st.integers(0, SLOTS - 1),
    array=st.integers(0, 2),
    place=st.integers(0, 3),
    change=st.integers(-5, 5).filter(bool),
)
def test_changes_with_any_token(slot: int, array: int, place: int, change: int) -> None:
    held = [BATCHES.slot(1, number) for number in range(SLOTS)]
    before = batch_digest(range(SLOTS), held)
    held[slot] = Slot(*(values.copy() for values in held[slot]))
    held[slot][array][0, place] += change
    assert batch_digest(range(SLOTS), held) != before


def test_changes_when_two_slots_are_exchanged() -> None:
    held = [BATCHES.slot(1, number) for number in range(SLOTS)]
    assert batch_digest(range(SLOTS), [held[1], held[0], *held[2:]]) != batch_digest(range(SLOTS), held)


@pytest.mark.parametrize(
    ("ranges", "joined"),
    [
        ([], []),
        ([[0, 8]], [[0, 8]]),
        ([[3, 6], [0, 3], [6, 8]], [[0, 8]]),
        ([[0, 3], [4, 8]], [[0, 3], [4, 8]]),  # slot 3 is missing
        ([[0, 4], [3, 8]], [[0, 4], [3, 8]]),  # slot 3 twice
        ([[0, 4], [4, 4], [4, 8]], [[0, 8]]),  # more data ranks than slots
    ],
)
def test_covered(ranges: list[list[int]], joined: list[list[int]]) -> None:
    assert covered(ranges) == joined
