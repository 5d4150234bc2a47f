"""What a job goes on from, and that the samples of a run that grows and shrinks are those of a run that does not.

The cases DA-01, DA-03, DA-05, DA-07 and DA-11 (resumed and resized runs that repeated or lost samples) are here at the
level of whole jobs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_train.checkpoint.catalog import commit, list_checkpoints, load_manifest
from elastic_train.checkpoint.claims import FRESH, go_on_from
from elastic_train.checkpoint.manifest import CheckpointId, object_path
from elastic_train.config.job import Job
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.job_folder import job_store
from elastic_train.controller.resumption import fall_back, open_data, take_over
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.order import SampleOrder
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save, save_and_commit, some_tensors
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

Lines = list[dict[str, Any]]


# -- which checkpoint ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Committed steps 10, 20, 30."""
    store = Store.open(str(tmp_path / "job"))
    for step in (10, 20, 30):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 2), step)
    return store


def goes_on_from(store: Store) -> CheckpointId | None:
    return take_over(store, "test", 2.0).checkpoint


def test_the_first_of_a_job_has_nothing_to_choose_from(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "job"))
    taken = take_over(store, "test", 1.0)
    assert (taken.claim.number, taken.claim.from_step) == (1, FRESH)
    assert (taken.checkpoint, taken.refused) == (None, [])
    again = take_over(store, "test", 2.0)
    assert (again.claim.number, again.claim.from_step, again.checkpoint) == (3, FRESH, None)


def test_the_newest_whole_checkpoint(store: Store) -> None:
    taken = take_over(store, "test", 2.0)
    assert (taken.claim.from_step, taken.checkpoint, taken.refused) == (30, CheckpointId(30, 1), [])
    assert list_checkpoints(store) == [10, 20, 30]


def test_a_truncated_one_is_passed_over_by_name_and_its_step_can_be_committed_anew(
    store: Store, tmp_path: Path
) -> None:
    path = object_path(30, 1, 1)
    store.write(path, [store.read(path)[:-1]])
    taken = take_over(store, "test", 2.0)
    assert (taken.checkpoint, taken.claim.from_step) == (CheckpointId(20, 1), 20)
    (sentence,) = taken.refused
    assert path in sentence
    assert list_checkpoints(store) == [10, 20]
    manifest = save(store, tmp_path, even_layout(some_tensors(30), 3), 30, generation=2)
    commit(store, manifest.model_copy(update={"claim": taken.claim.number}), taken.claim)
    assert goes_on_from(store) == CheckpointId(30, taken.claim.number)


def test_one_that_a_rank_found_damaged_counts_no_longer(store: Store) -> None:
    """Sizes are right, so only the caller knows. The claim is a new one, although its holder is the same."""
    first = take_over(store, "test", 2.0)
    taken = fall_back(store, first.claim, 3.0, damaged=(CheckpointId(30, 1),))
    assert (taken.checkpoint, taken.refused) == (CheckpointId(20, 1), [])
    assert (taken.claim.number, taken.claim.from_step) == (first.claim.number + 1, 20)
    assert list_checkpoints(store) == [10, 20]
    assert store.exists("checkpoints/refused/step-00000030-c1.json")
    assert goes_on_from(store) == CheckpointId(20, 1)


def test_who_dies_before_the_refused_one_is_put_aside_has_refused_it_all_the_same(store: Store) -> None:
    first = take_over(store, "test", 2.0)
    go_on_from(store, first.claim, 20, 3.0)
    assert store.exists(CheckpointId(30, 1).path)
    assert goes_on_from(store) == CheckpointId(20, 1)


def test_ck_03_an_attempt_that_was_not_committed_is_ignored_with_a_word(store: Store, tmp_path: Path) -> None:
    """CK-03: killed in the middle of a save, the job goes on from the one before, and says what it ignores."""
    save(store, tmp_path, even_layout(some_tensors(40), 2), 40, generation=3)
    taken = take_over(store, "test", 2.0)
    assert taken.checkpoint == CheckpointId(30, 1)
    (sentence,) = taken.refused
    assert "step 40 is incomplete" in sentence


def test_when_all_are_damaged_none_is_chosen_and_each_is_named(store: Store) -> None:
    for step in (10, 20):
        store.delete(object_path(step, 1, 0))
    store.write(CheckpointId(30, 1).path, [b"{}"])
    taken = take_over(store, "test", 2.0)
    assert taken.checkpoint is None
    assert [name in sentence for name, sentence in zip(
        (CheckpointId(30, 1).path, object_path(20, 1, 0), object_path(10, 1, 0)), taken.refused, strict=True
    )] == [True] * 3  # fmt: skip
    assert list_checkpoints(store) == []


# -- the data --------------------------------------------------------------------------------------------------------


def test_sample_ids_of_a_step(corpus: Path, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, "ids", "training.global_batch=6", "training.micro_batch=2")
    data = open_data(job)
    dataset = TokenDataset.open(str(corpus), 32)
    assert data.digest == dataset.digest
    order = SampleOrder(len(dataset), job.seed)
    assert data.sample_ids(1) == [order.sample_id(n) for n in range(6)]
    assert data.sample_ids(5) == [order.sample_id(n) for n in range(24, 30)]
    steps = len(dataset) // 6 * 2
    ids = [sample for step in range(1, steps + 1) for sample in data.sample_ids(step)]
    assert set(ids[: len(dataset)]) == set(range(len(dataset)))


def test_too_little_data_is_refused_with_both_numbers(corpus: Path, tmp_path: Path) -> None:
    samples = len(TokenDataset.open(str(corpus), 2048))
    assert samples < 99
    job = make_job(corpus, tmp_path, "small", "data.sequence_length=2048", "training.global_batch=99")
    with pytest.raises(DataError, match=rf"{samples} sequences of 2048 tokens are fewer than training.global_batch=99"):
        open_data(job)
    enough = make_job(corpus, tmp_path, "small", "data.sequence_length=2048", f"training.global_batch={samples}")
    assert sorted(open_data(enough).sample_ids(1)) == list(range(samples))


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers(corpus: Path, tmp_path: Path) -> None:
    entries = TokenDataset.open(str(corpus), 32).vocab_size
    job = make_job(corpus, tmp_path, "vocabulary", f"model.vocab_size={entries - 1}")
    with pytest.raises(DataError, match=rf"model\.vocab_size={entries - 1}: must be at least {entries}"):
        open_data(job)
    open_data(make_job(corpus, tmp_path, "vocabulary", f"model.vocab_size={entries}"))


def test_missing_data_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data has no manifest\.json"):
        open_data(make_job(tmp_path / "no data", tmp_path, "missing"))


def test_a_shard_that_is_cut_off_is_not_the_coordinators_to_find(corpus: Path, tmp_path: Path) -> None:
    """Only the manifest is read when a job opens: the shards may be anywhere and of any size."""
    shutil.copytree(corpus, tmp_path / "data")
    for shard in (tmp_path / "data").glob("**/*.arrow"):
        shard.unlink()
    assert open_data(make_job(tmp_path / "data", tmp_path, "cut")).sample_ids(1)


# -- whole jobs ------------------------------------------------------------------------------------------------------


def layouts(run: LocalJob) -> list[str]:
    return [event["layout"] for event in run.lines("ledger") if event["event"] == "generation_formed"]


def grow(run: LocalJob, names: tuple[str, ...], node: str) -> None:
    """Take in new hosts; a trainer is held meanwhile, or this job would be over before they are ready."""
    paused = run.trainer_pids()[0]
    os.kill(paused, signal.SIGSTOP)
    for name in names:
        run.start_host(name, node)
    run.wait(lambda status: status["spares"] == len(names))
    os.kill(paused, signal.SIGCONT)


@pytest.mark.slow
def test_da_03_from_4_to_2_to_4_hosts_every_step_has_the_samples_of_one_host(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:
    job = make_job(corpus, tmp_path, "da-03", "parallel.pp=1", "hosts.min=2", "hosts.start_wait_seconds=120")
    with LocalJob(job) as run:
        run.start_hosts("aabb")
        run.wait_step(5)
        run.kill_host("b2")
        run.kill_host("b3")
        run.wait(lambda status: status["layout"] == "dp_shard2" and status["state"] == "running")
        run.wait_step(10)
        grow(run, ("c4", "c5"), "c")
        assert run.finish()["state"] == "finished"
        lines = run.lines("steps")
        assert [line["samples"] for line in lines] == [line["samples"] for line in reference]
        assert_same_curve(lines, reference)
        assert (layouts(run)[0], layouts(run)[-1]) == ("dp_shard4", "dp_shard4")
        assert "dp_shard2" in layouts(run)
        used = Counter(sample for line in lines for sample in line["samples"])
        assert set(used.values()) == {1}  # 240 samples, within the first epoch
        assert len(used) == 240


def committed_steps(run: LocalJob) -> list[int]:
    return [event["step"] for event in run.events if event["event"] == "checkpoint_committed"]


@pytest.mark.slow
def test_da_01_a_resume_in_the_middle_of_the_second_epoch_goes_on_in_its_order(corpus: Path, tmp_path: Path) -> None:
    samples = len(TokenDataset.open(str(corpus), 160))
    order = SampleOrder(samples, seed=1)
    expected = [[order.sample_id(n) for n in range(8 * step, 8 * step + 8)] for step in range(30)]
    assert samples < 8 * 20, f"{samples} samples: the second epoch must begin well before step 30"
    assert samples % 8, "an epoch must end inside a step"

    def job(hosts: int) -> Job:
        overrides = ("data.sequence_length=160", "training.micro_batch=2", "checkpoint.every_steps=5")
        return make_job(corpus, tmp_path, "da-01", "parallel.pp=1", f"hosts.max={hosts}", *overrides)

    with LocalJob(job(2)) as first:
        first.start_hosts("ab")
        first.wait(lambda _: any(8 * step > samples for step in committed_steps(first)))
        first.kill_host("a0")
        first.kill_host("b1")
    with LocalJob(job(1), "run1") as second:
        resumed = second.status()["step"]
        assert samples < 8 * resumed < 240
        second.start_hosts("a")
        assert second.finish()["state"] == "finished"
        lines = second.lines("steps")
    assert [line["samples"] for line in lines] == expected
    used = [sample for line in lines for sample in line["samples"]]
    assert sorted(used[:samples]) == list(range(samples))
    assert len(set(used[samples : 2 * samples])) == len(used[samples : 2 * samples])
    assert used[:8] != used[samples : samples + 8]


@pytest.mark.slow
def test_da_07_and_11_the_cursor_counts_what_the_optimizer_has_consumed(corpus: Path, tmp_path: Path) -> None:
    """10 steps of 4 slots x micro-batch 2 on each of 2 data ranks are 160 samples; the next is number 160."""

    def job(hosts: int) -> Job:
        batch = ("training.steps=15", "training.global_batch=16", "training.micro_batch=2", "parallel.pp=1")
        return make_job(corpus, tmp_path, "da-07", *batch, f"hosts.min={hosts}", f"hosts.max={hosts}")

    with LocalJob(job(2)) as first:
        first.start_hosts("ab")
        first.wait(lambda status: any(event["event"] == "checkpoint_committed" for event in first.events))
        first.wait_step(12)  # the trainers are ahead of the checkpoint
        for name in ("a0", "b1"):
            first.kill_host(name)
    manifest = load_manifest(job_store(job(2)), 10)
    assert manifest.cursor == 160
    assert manifest.layout["dp_shard"] == 2
    with LocalJob(job(3), "run1") as second:
        assert second.status()["step"] == 10
        second.start_hosts("abc")
        assert second.finish()["state"] == "finished"
        lines = second.lines("steps")
    order = SampleOrder(len(TokenDataset.open(str(corpus), 32)), seed=1)
    assert lines[10]["step"] == 11
    assert lines[10]["samples"] == [order.sample_id(n) for n in range(160, 176)]
    assert {line["valid_tokens"] for line in lines} == {16 * 32}
    assert load_manifest(job_store(job(3)), 15).cursor == 240


async def start_and_close(job: Job) -> None:
    coordinator = Coordinator(job, "127.0.0.1", "token", lambda event: None)
    try:
        await coordinator.start()
    finally:
        await coordinator.close()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_da_05_a_job_that_cannot_start_says_why_and_leaves_no_process(corpus: Path, tmp_path: Path) -> None:
    before = children()
    with pytest.raises(DataError, match=r"\d+ sequences of 32 tokens are fewer than training.global_batch=100000"):
        asyncio.run(start_and_close(make_job(corpus, tmp_path, "da-05", "training.global_batch=100000")))
    with pytest.raises(DataError, match="gone"):
        asyncio.run(start_and_close(make_job(tmp_path / "gone", tmp_path, "gone")))
    assert children() == before
