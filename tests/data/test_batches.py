from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config.training import TrainingConfig
from elastic_train.data.batches import StepBatches, slots_of
from elastic_train.data.errors import DataError
from elastic_train.data.order import SampleOrder
from elastic_train.data.samples import PADDING_LABEL, Sample
from tests.samples import OneByOne, sample_of


class Counting(OneByOne):
    """Samples whose first token spells their number."""

    sequence_length = 4

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int) -> Sample:
        return sample_of(np.arange(index, index + 5))


def batches(count: int, global_batch: int, micro_batch: int = 1, seed: int = 1, steps: int = 10) -> StepBatches:
    training = TrainingConfig(steps=steps, global_batch=global_batch, micro_batch=micro_batch)
    return StepBatches(Counting(count), SampleOrder(count, seed), training)


def trace(made: StepBatches, data_ranks: int, step: int) -> list[int]:
    """Sample ids that the data ranks read in a step, rank after rank, from the tokens themselves."""
    ids: list[int] = []
    for data_rank in range(data_ranks):
        slots = slots_of(data_rank, data_ranks, made.slots)
        ids += [i for slot in made.load(step, slots) for i in slot.input_ids[:, 0].tolist()]
    return ids


@given(st.integers(1, 40), st.integers(0, 100))
def test_slots_are_shared_out_in_order_and_evenly(data_ranks: int, slots: int) -> None:
    shares = [slots_of(rank, data_ranks, slots) for rank in range(data_ranks)]
    assert [slot for share in shares for slot in share] == list(range(slots))
    sizes = [len(share) for share in shares]
    assert (
        sizes == sorted(sizes, reverse=True)
        and sizes[0] == -(-slots // data_ranks)
        and sizes[-1] == slots // data_ranks
    )


def test_a_slot_has_inputs_and_next_tokens() -> None:
    made = batches(64, global_batch=8, micro_batch=2)
    inputs, labels, documents = made.slot(3, 1)
    ids = made.sample_ids(3)[2:4]
    assert inputs.dtype == labels.dtype == documents.dtype == np.int64 and documents.shape == inputs.shape
    assert inputs.tolist() == [[i, i + 1, i + 2, i + 3] for i in ids]
    assert labels.tolist() == [[i + 1, i + 2, i + 3, i + 4] for i in ids]


def test_padding_counts_in_no_loss() -> None:
    inputs, labels, _ = batches(64, global_batch=8, micro_batch=2).padding()
    assert inputs.shape == labels.shape == (2, 4)
    assert not inputs.any() and (labels == PADDING_LABEL).all()


def test_resuming_in_the_second_epoch_goes_on_as_if_never_stopped() -> None:  # DA-01
    whole = batches(1000, global_batch=8, steps=500)
    resumed = batches(1000, global_batch=8, steps=500)
    assert [resumed.sample_ids(step) for step in range(201, 501)] == [whole.sample_ids(step) for step in range(1, 501)][
        200:
    ]
    assert whole.sample_ids(1) != whole.sample_ids(126)


def test_any_number_of_data_ranks_reads_the_same_samples() -> None:  # DA-03
    made = batches(120, global_batch=8, steps=15)
    ranks = [4] * 5 + [2] * 5 + [4] * 5
    steps = [trace(made, data_ranks, step) for step, data_ranks in enumerate(ranks, start=1)]
    assert steps == [trace(made, 1, step) for step in range(1, 16)] == [made.sample_ids(step) for step in range(1, 16)]
    assert Counter(i for ids in steps for i in ids) == dict.fromkeys(range(120), 1)
    for data_ranks in (3, 5, 7, 11):
        assert trace(made, data_ranks, 2) == made.sample_ids(2)


def test_fewer_samples_than_a_batch_is_an_error_with_both_numbers() -> None:  # DA-05
    with pytest.raises(DataError, match=r"^3 sequences of \d+ tokens are fewer than training.global_batch=8; "):
        batches(3, global_batch=8)


def test_steps_consume_the_whole_global_batch() -> None:  # DA-07
    made = batches(1000, global_batch=4 * 2 * 2, micro_batch=2, steps=11)
    order = SampleOrder(1000, 1)
    assert made.sample_ids(11) == [order.sample_id(n) for n in range(160, 176)]


def test_an_epoch_may_end_inside_a_step() -> None:  # DA-09, DA-10
    made = batches(10, global_batch=8, steps=5)
    ids = [i for step in range(1, 6) for i in made.sample_ids(step)]
    for start in range(0, 40, 10):
        assert sorted(ids[start : start + 10]) == list(range(10))
    assert ids[:10] != ids[10:20]


def test_what_an_epoch_leaves_over_is_carried_into_a_step_with_the_next() -> None:  # LOSS-09
    """Ten micro-batches an epoch, four a step: five full steps in two epochs, the third with samples of both."""
    made = batches(10, global_batch=4, steps=5)
    steps = [made.sample_ids(step) for step in range(1, 6)]
    assert [len(ids) for ids in steps] == [4] * 5
    order = SampleOrder(10, 1)
    assert steps[2] == [order.sample_id(n) for n in (8, 9, 10, 11)]
    assert sorted(steps[0] + steps[1] + steps[2][:2]) == sorted(steps[2][2:] + steps[3] + steps[4]) == list(range(10))


def test_nothing_is_repeated_or_left_out_after_a_resume_inside_an_epoch() -> None:  # DA-10
    before = batches(64, global_batch=4, steps=16)
    after = batches(64, global_batch=4, steps=16)
    ids = [i for step in range(1, 6) for i in before.sample_ids(step)]
    ids += [i for step in range(6, 17) for i in after.sample_ids(step)]
    assert Counter(ids) == dict.fromkeys(range(64), 1)


@pytest.mark.parametrize(("step", "slot"), [(0, 0), (1, 8), (1, -1)])
def test_steps_and_slots_that_do_not_exist(step: int, slot: int) -> None:
    with pytest.raises(ValueError, match=r"step 0 is not accepted|is outside the 8 slots"):
        batches(64, global_batch=8).slot(step, slot)


def test_an_order_over_another_number_of_samples() -> None:
    with pytest.raises(ValueError, match="the order is over 63 samples, the data set has 64"):
        StepBatches(Counting(64), SampleOrder(63, 1), TrainingConfig(steps=1, global_batch=8))
