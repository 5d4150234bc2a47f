"""The global batches of a job whose data ranks change at random: the same to the byte, every sample once per epoch."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from elastic_train.config.training import TrainingConfig
from elastic_train.data.batches import StepBatches, slots_of
from elastic_train.data.corpus import open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.order import SampleOrder
from elastic_train.data.prepare import prepare
from elastic_train.data.samples import Slot

STEPS = 25
MICRO, SLOTS = 2, 11
"""22 sequences a step: no number of data ranks but 1 divides the slots."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("elastic")
    chance = random.Random(5)
    for number in range(12):
        (folder / f"{number}.txt").write_text(
            " ".join(str(chance.randrange(1000)) for _ in range(chance.randrange(400)))
        )
    return prepare(open_corpus(f"{folder}/*.txt"), str(folder / "shards"), 300, shard_tokens=1000, batch_tokens=64).uri


def open_batches(uri: str) -> tuple[TokenDataset, StepBatches]:
    """As a trainer does that begins: nothing is known but the step."""
    dataset = TokenDataset.open(uri, 16)
    training = TrainingConfig(steps=STEPS, global_batch=MICRO * SLOTS, micro_batch=MICRO)
    return dataset, StepBatches(dataset, SampleOrder(len(dataset), 3), training)


def as_bytes(slots: list[Slot]) -> bytes:
    return b"".join(np.ascontiguousarray(array).tobytes() for slot in slots for array in slot)


@pytest.mark.parametrize("seed", range(8))
def test_random_resizes_change_no_byte(shards: str, seed: int) -> None:
    """DA-03, DA-07, DA-10: also backwards, to a step that is done again, and over the edges of epochs inside a step."""
    dataset, whole = open_batches(shards)
    expected = {step: as_bytes([whole.slot(step, slot) for slot in range(SLOTS)]) for step in range(1, STEPS + 1)}
    epochs = STEPS * MICRO * SLOTS / len(dataset)
    assert epochs > 1
    assert len(dataset) % (MICRO * SLOTS)
    chance = random.Random(seed)
    finished = 0
    while finished < STEPS:
        data_ranks = chance.randint(1, 8)
        ranks = [open_batches(shards)[1] for _ in range(data_ranks)]
        for step in range(finished + 1, min(finished + chance.randint(1, 6), STEPS) + 1):
            loaded = [made.load(step, slots_of(rank, data_ranks, SLOTS)) for rank, made in enumerate(ranks)]
            given = as_bytes([slot for slots in loaded for slot in slots])
            assert given == expected[step], f"step {step} on {data_ranks} data ranks"
            finished = step
        if finished < STEPS and chance.random() < 0.3:
            finished = max(0, finished - chance.randint(1, 4))  # rolled back
    trace = [sample for step in range(1, STEPS + 1) for sample in whole.sample_ids(step)]
    for begin in range(0, len(trace) - len(dataset) + 1, len(dataset)):
        assert Counter(trace[begin : begin + len(dataset)]) == Counter(range(len(dataset)))


def test_the_last_steps_of_the_data(shards: str) -> None:
    """The sequences are those of the samples, to the last one, whose label is the data set's last whole one."""
    dataset, made = open_batches(shards)
    last = dataset.sample(len(dataset) - 1)
    places = {sample: place for place, sample in enumerate(s for t in range(1, STEPS + 1) for s in made.sample_ids(t))}
    place = places[len(dataset) - 1]
    step, inside = divmod(place, MICRO * SLOTS)
    slot, row = divmod(inside, MICRO)
    given = made.slot(step + 1, slot)
    assert all((array[row] == expected).all() for array, expected in zip(given, last, strict=True))
    assert last.input_ids.shape == (16,)
