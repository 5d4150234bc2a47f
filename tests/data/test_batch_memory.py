"""Batches in memory, and those that are read ahead."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from elastic_train.config.training import TrainingConfig
from elastic_train.data import batch_memory
from elastic_train.data.batch_memory import THREADS, BatchMemory
from elastic_train.data.batches import StepBatches
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.order import SampleOrder
from elastic_train.data.record_batches import Batch
from tests.data.token_sets import make


class Loader:
    """Batches of 1,000 bytes that spell their number; notes what was read, and waits or refuses where it is told to."""

    def __init__(self) -> None:
        self.foreground: list[tuple[int, int]] = []
        self.background: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.refused: set[tuple[int, int]] = set()
        self.came = threading.Semaphore(0)

    def __call__(self, key: tuple[int, int]) -> Batch:
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


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_was_used_last_is_kept() -> None:
    loader = Loader()
    memory = BatchMemory(3000)
    for number in (0, 1, 2, 0, 3, 0, 1):
        assert memory.get(loader, (0, number)).tokens[0] == number
    assert loader.foreground == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 1)]


def test_a_batch_larger_than_the_limit_is_held_alone() -> None:
    loader = Loader()
    memory = BatchMemory(10)
    for number in (0, 0, 1, 1):
        memory.get(loader, (0, number))
    assert loader.foreground == [(0, 0), (0, 1)]


def test_what_is_read_ahead_is_read_once() -> None:
    loader = Loader()
    memory = BatchMemory()
    for _ in range(2):
        for number in range(20):
            memory.prefetch(loader, [(0, number)])
    assert [int(memory.get(loader, (0, number)).tokens[0]) for number in range(20)] == list(range(20))
    memory.prefetch(loader, [(0, 3)])
    assert sorted(loader.foreground + loader.background) == [(0, number) for number in range(20)]


def test_who_needs_a_batch_waits_for_the_thread_that_reads_it_and_reads_himself_what_none_has_begun() -> None:
    loader = Loader()
    memory = BatchMemory()
    loader.gate.clear()
    for number in range(THREADS + 2):
        memory.prefetch(loader, [(0, number)])
    assert memory.get(loader, (0, THREADS + 1)).tokens[0] == THREADS + 1  # all threads are at the gate, or will be
    threading.Timer(0.05, loader.gate.set).start()
    assert memory.get(loader, (0, 0)).tokens[0] == 0
    loader.wait(THREADS + 1 - loader.foreground.count((0, 0)))
    assert (0, THREADS + 1) in loader.foreground and (0, THREADS + 1) not in loader.background


def test_an_error_is_told_when_the_batch_is_needed_and_passes() -> None:
    loader = Loader()
    loader.refused = {(0, 1)}
    memory = BatchMemory()
    memory.prefetch(loader, [(0, 1)])
    loader.wait(1)
    for _ in range(2):
        with pytest.raises(DataError, match=r"batch \(0, 1\) is damaged"):
            memory.get(loader, (0, 1))
    loader.refused = set()
    assert memory.get(loader, (0, 1)).tokens[0] == 1


def test_threads_that_want_the_same_get_the_same() -> None:
    memory, found = BatchMemory(5000), []
    loader = Loader()

    def use(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, 30, 400).tolist():
            memory.prefetch(loader, [(0, (number + seed) % 30)])
            found.append(int(memory.get(loader, (0, number)).tokens[0]) == number)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 2400 and all(found)
    with memory._lock:  # what is read ahead may go on
        assert memory._bytes == sum(entry.nbytes for entry in memory._entries.values() if entry.batch is not None)
        assert memory._pinned_bytes == sum(entry.nbytes for entry in memory._entries.values() if entry.pinned) <= 5000
        assert memory._bytes <= 5000 + 1000


def test_what_is_read_ahead_stays_until_it_was_used_as_often_as_it_was_asked_for() -> None:
    loader, memory = Loader(), BatchMemory(5000)
    for number in (0, 1, 2, 0):
        memory.prefetch(loader, [(0, number)])
    loader.wait(3)
    for number in range(10, 20):  # would throw them out
        memory.get(loader, (0, number))
    assert [int(memory.get(loader, (0, number)).tokens[0]) for number in (0, 1, 2, 0)] == [0, 1, 2, 0]
    assert sorted(loader.background) == [(0, 0), (0, 1), (0, 2)]
    assert loader.foreground == [(0, number) for number in range(10, 20)]
    for number in range(20, 30):
        memory.get(loader, (0, number))
    memory.get(loader, (0, 0))
    assert loader.foreground[-1] == (0, 0)  # nothing holds it any more


def test_reading_ahead_stops_when_what_it_has_read_fills_the_room_and_goes_on_when_that_is_used() -> None:
    loader, memory = Loader(), BatchMemory(5000)
    memory.get(loader, (0, 99))  # how large they are is known from the first one
    for number in range(20):
        memory.prefetch(loader, [(0, number)])
    until(lambda: memory._pinned_bytes == 5000)
    assert len(loader.background) == 5
    for number in range(19, 15, -1):  # whoever needs what has not been begun reads it himself
        assert memory.get(loader, (0, number)).tokens[0] == number
    for number in range(16):
        assert memory.get(loader, (0, number)).tokens[0] == number
    assert sorted(loader.foreground + loader.background) == [*((0, number) for number in range(20)), (0, 99)]


def test_what_is_there_is_not_read_ahead_even_if_it_cannot_be_pinned() -> None:
    loader, memory = Loader(), BatchMemory(1000)
    memory.get(loader, (0, 0))
    memory.prefetch(loader, [(0, 1)])
    until(lambda: memory._pinned_bytes == 1000)
    memory.prefetch(loader, [(0, 0)])
    memory.get(loader, (0, 1))
    memory.prefetch(loader, [(0, 2)])
    loader.wait(2)
    assert loader.background == [(0, 1), (0, 2)] and loader.foreground == [(0, 0)]


def test_what_will_not_be_used_is_let_go_and_not_read() -> None:
    """Else pins would fill the room for good, after a change of ranks."""
    loader, memory = Loader(), BatchMemory(3000)
    memory.get(loader, (0, 99))
    memory.prefetch(loader, [(0, number) for number in range(9)])
    until(lambda: memory._pinned_bytes == 3000)
    memory.forget(loader, [(0, number) for number in range(9)])
    assert memory._pinned_bytes == 0 and len(memory._entries) <= 4
    memory.prefetch(loader, [(0, 20), (0, 21)])
    loader.wait(5)
    assert sorted(loader.background) == [(0, 0), (0, 1), (0, 2), (0, 20), (0, 21)]


def test_no_thread_outlives_what_it_has_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that have read everything, nor those that wait for room in a memory that is not used any more."""
    monkeypatch.setattr(batch_memory, "IDLE_SECONDS", 0.01)
    before = set(threading.enumerate())
    for limit in (1000, 10**6):
        loader, memory = Loader(), BatchMemory(limit)
        memory.prefetch(loader, [(0, number) for number in range(9)])
        loader.wait(1)
        gone = weakref.ref(memory)
        del memory
        until(lambda gone=gone: gone() is None)
    until(lambda: before.issuperset(threading.enumerate()))


def test_several_data_sets_share_the_room_and_are_not_mixed_up() -> None:
    memory, one, two = BatchMemory(3000), Loader(), Loader()
    for loader in (one, two):
        for number in (0, 1):
            memory.get(loader, (0, number))
    assert memory._bytes == 3000
    memory.get(one, (0, 1))
    memory.get(one, (0, 0))
    assert one.foreground == [(0, 0), (0, 1), (0, 0)] and two.foreground == [(0, 0), (0, 1)]


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


def trace(batches: StepBatches, steps: range, slots: int = 4) -> list[list[list[int]]]:
    return [
        [row for slot in batches.load(step, range(slots)) for row in slot.input_ids.tolist()] for step in steps
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
    forgotten: list[int] = []
    monkeypatch.setattr(dataset, "prefetch", ahead.extend)
    monkeypatch.setattr(dataset, "forget", forgotten.extend)

    def ids(steps: range) -> list[int]:
        return [i for step in steps for i in made.sample_ids(step)]

    trace(made, range(1, 2))
    assert ahead == ids(range(1, 5))
    trace(made, range(2, 21))
    assert ahead == ids(range(1, 21)) and not forgotten
    trace(made, range(5, 7))  # back again
    assert ahead == ids(range(1, 21)) + ids(range(5, 10)) and not forgotten
    trace(made, range(8, 9))  # a jump: 7 is forgotten
    assert ahead[-16:] == ids(range(10, 12)) and forgotten == made.sample_ids(7)
    made.load(9, range(1, 3))  # another number of ranks
    assert forgotten == ids(range(7, 8)) + ids(range(9, 12))


def test_depth_0_starts_no_thread(batches: Callable[[int], tuple[StepBatches, TokenDataset]]) -> None:
    before = threading.active_count()
    trace(batches(0)[0], range(1, 21))
    assert threading.active_count() == before


def test_reading_ahead_reads_no_more_often(tmp_path: Path) -> None:
    """A window of the order needs twice the room: what is read ahead is not thrown out before it was used."""
    make(str(tmp_path), [16 * 2**12], 2**9)
    loads = {}
    for depth in (0, 2, 6):
        memory = BatchMemory(32 * 2**10)
        dataset = TokenDataset.open(str(tmp_path), 16, memory=memory)
        training = TrainingConfig(steps=len(dataset) // 16, global_batch=16, micro_batch=2)
        batches = StepBatches(dataset, SampleOrder(len(dataset), 1), training, depth)
        counted = count_loads(dataset)
        trace(batches, range(1, training.steps + 1), training.slots)
        loads[depth] = len(counted)
    assert loads[0] > 128 and max(loads[2], loads[6]) <= 1.05 * loads[0], loads


def count_loads(dataset: TokenDataset) -> list[tuple[int, int]]:
    reader, counted = dataset._reader, []
    load = reader._load

    def counting(key: tuple[int, int]) -> Batch:
        counted.append(key)
        return load(key)

    reader._load = counting  # type: ignore[method-assign]
    return counted
