"""Batches in memory, and those that are read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.config.training import TrainingConfig
from elastic_train.data.batch_memory import THREADS, BatchMemory, Key
from elastic_train.data.batches import StepBatches
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.order import SampleOrder
from elastic_train.data.record_batches import Batch
from tests.data.token_sets import make


class Loader:
    """Batches of 1,000 bytes that spell their number; notes what was read, and waits or refuses where it is told to."""

    def __init__(self) -> None:
        self.foreground: list[Key] = []
        self.background: list[Key] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refused: set[Key] = set()
        self.came = threading.Semaphore(0)

    def __call__(self, key: Key) -> Batch:
        if threading.current_thread() is threading.main_thread():
            self.foreground.append(key)
        else:
            assert self.gate.wait(60)
            self.background.append(key)
            self.came.release()
        if key in self.refused:
            raise DataError(f"batch {key} is damaged")
        return Batch(np.full(500, key[1], np.uint16), None)

    def wait(self, count: int) -> None:
        """Until so many more were read in the background."""
        for _ in range(count):
            assert self.came.acquire(timeout=60)


def test_what_was_used_last_is_kept() -> None:
    loader = Loader()
    memory = BatchMemory(loader, 3000)
    for number in (0, 1, 2, 0, 3, 0, 1):
        assert memory.get((0, number)).tokens[0] == number
    assert loader.foreground == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 1)]


def test_a_batch_larger_than_the_limit_is_held_alone() -> None:
    loader = Loader()
    memory = BatchMemory(loader, 10)
    for number in (0, 0, 1, 1):
        memory.get((0, number))
    assert loader.foreground == [(0, 0), (0, 1)]


def test_what_is_read_ahead_is_read_once() -> None:
    loader = Loader()
    memory = BatchMemory(loader)
    for _ in range(2):
        for number in range(20):
            memory.prefetch((0, number))
    assert [int(memory.get((0, number)).tokens[0]) for number in range(20)] == list(range(20))
    memory.prefetch((0, 3))
    assert sorted(loader.foreground + loader.background) == [(0, number) for number in range(20)]


def test_who_needs_a_batch_waits_for_the_thread_that_reads_it_and_reads_himself_what_none_has_begun() -> None:
    loader = Loader()
    memory = BatchMemory(loader)
    loader.gate.clear()
    for number in range(THREADS + 2):
        memory.prefetch((0, number))
    assert memory.get((0, THREADS + 1)).tokens[0] == THREADS + 1  # all threads are at the gate, or will be
    threading.Timer(0.05, loader.gate.set).start()
    assert memory.get((0, 0)).tokens[0] == 0
    loader.wait(THREADS + 1 - loader.foreground.count((0, 0)))
    assert (0, THREADS + 1) in loader.foreground and (0, THREADS + 1) not in loader.background


def test_an_error_is_told_when_the_batch_is_needed_and_passes() -> None:
    loader = Loader()
    loader.refused = {(0, 1)}
    memory = BatchMemory(loader)
    memory.prefetch((0, 1))
    loader.wait(1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"batch \(0, 1\) is damaged"):
            memory.get((0, 1))
    loader.refused = set()
    assert memory.get((0, 1)).tokens[0] == 1


def test_threads_that_want_the_same_get_the_same() -> None:
    memory, found = BatchMemory(Loader(), 5000), []

    def use(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 30, 400).tolist():
            memory.prefetch((0, (number + seed) % 30))
            found.append(int(memory.get((0, number)).tokens[0]) == number)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 2400 and all(found)
    assert memory._bytes == sum(batch.nbytes for batch in memory._held.values()) <= 5000


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def batches(tmp_path: Path) -> Callable[[int], tuple[StepBatches, TokenDataset]]:
    """Of 100 samples of 8 tokens in 51 record batches, 8 a step, with so many steps read ahead."""
    make(str(tmp_path), [500, 303], 16)

    def made(depth: int) -> tuple[StepBatches, TokenDataset]:
        dataset = TokenDataset.open(str(tmp_path), 8)
        training = TrainingConfig(steps=20, global_batch=8, micro_batch=2)
        return StepBatches(dataset, SampleOrder(100, 1), training, depth), dataset

    return made


def trace(batches: StepBatches, steps: range) -> list[list[list[int]]]:
    return [
        [row for slot in range(4) for row in batches.slot(step, slot).input_ids.tolist()] for step in steps
    ]  # fmt: skip


def test_what_is_read_ahead_changes_no_step_and_no_resume(
    batches: Callable[[int], tuple[StepBatches, TokenDataset]],
) -> None:  # DA-11
    """Depth 1 and 8, killed after step 10 with samples read ahead: step 11 and all that follow are the same."""
    plain, dataset = batches(0)
    expected = trace(plain, range(1, 21))
    ids = [i for step in range(1, 21) for i in plain.sample_ids(step)]
    assert [row for step in expected for row in step] == [dataset.sample(i).input_ids.tolist() for i in ids]
    for depth in (1, 8):
        assert trace(batches(depth)[0], range(1, 11)) + trace(batches(depth)[0], range(11, 21)) == expected
        for steps in (range(4, 9), range(2, 4), range(15, 21)):  # a step back, and a jump
            assert trace(batches(depth)[0], steps) == expected[steps.start - 1 : steps.stop - 1]


def test_each_step_is_read_ahead_once_and_none_after_the_last(
    batches: Callable[[int], tuple[StepBatches, TokenDataset]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, dataset = batches(3)
    ahead: list[int] = []
    monkeypatch.setattr(dataset, "prefetch", ahead.append)
    trace(made, range(1, 2))
    assert sorted(ahead) == sorted(i for step in (2, 3, 4) for i in made.sample_ids(step))
    trace(made, range(2, 21))
    assert sorted(ahead) == sorted(i for step in range(2, 21) for i in made.sample_ids(step))
    ahead.clear()
    trace(made, range(5, 7))  # back again
    assert sorted(ahead) == sorted(i for step in range(6, 10) for i in made.sample_ids(step))


def test_depth_0_starts_no_thread(batches: Callable[[int], tuple[StepBatches, TokenDataset]]) -> None:
    before = threading.active_count()
    trace(batches(0)[0], range(1, 21))
    assert threading.active_count() == before
