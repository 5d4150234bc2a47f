"""Checkpoints of whole jobs: who may still write, what is known of a step, when the next one is due."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest, read_catalog
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.interval import Measured, interval_steps
from elastic_train.checkpoint.restore_checkpoint import restore_from_checkpoint
from elastic_train.checkpoint.verify import verify_checkpoint
from elastic_train.controller import saving
from elastic_train.controller.job_folder import job_store
from elastic_train.storage.errors import StorageError
from elastic_train.storage.local import LocalStore
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]


def test_a_superseded_submission_ends_without_waiting_for_a_commit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_CLAIM_SECONDS", 0.1)
    steps = ("training.steps=100000", "checkpoint.every_steps=100000")
    first_job = make_job(corpus, tmp_path, "superseded", *steps, "hosts.max=1")
    with LocalJob(first_job) as first:
        first.start_host("a", "a")
        first.wait_step(2)
        with LocalJob(make_job(corpus, tmp_path, "superseded", *steps), "run1") as second:
            status = first.finish()
            assert second.status()["state"] == "starting"
            assert status["state"] == "failed"
            assert status["message"].startswith("another submission of this job has taken over: claim 1 on ")
            assert first.hosts["a"].returncode == 0
            assert [event["status"] for event in first.told("job_finished")] == ["failed"]
    assert list_checkpoints(job_store(first_job)) == []
    ledger = [json.loads(line)["event"] for line in (tmp_path / "superseded" / "ledger.jsonl").read_text().splitlines()]
    assert ledger[-1] == "job_started"  # the other's: the log is no longer the first one's to write


def test_one_that_finds_out_at_its_last_commit_does_not_make_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_CLAIM_SECONDS", 1000.0)
    steps = ("training.steps=2", "schedule.warmup_steps=1")
    job = make_job(corpus, tmp_path, "last", *steps, "hosts.max=1")
    with LocalJob(job) as first:
        with LocalJob(job, "run1"):
            pass
        first.start_host("a", "a")
        status = first.finish()
    assert (status["state"], status["step"]) == ("failed", 2)
    assert "another submission of this job has taken over" in status["message"]
    assert list_checkpoints(job_store(job)) == []


def test_the_metrics_of_a_checkpoint_are_those_of_its_step_and_the_best_one_stays(corpus: Path, tmp_path: Path) -> None:
    overrides = ("checkpoint.every_steps=5", "checkpoint.keep_last=2", "checkpoint.keep_every=10")
    evaluation = ("evaluation.every_steps=10", "evaluation.samples=4", f"evaluation.uri='{corpus}'")
    job = make_job(corpus, tmp_path, "metrics", *overrides, *evaluation, "hosts.max=1")
    with LocalJob(job) as run:
        run.start_host("a", "a")
        assert run.finish()["state"] == "finished"
        lines = {line["step"]: line for line in run.lines("steps")}
        committed, removed = run.told("checkpoint_committed"), run.told("checkpoints_removed")
    store = job_store(job)
    kept = [event["step"] for event in committed if event["step"] % 10 == 0]
    assert set(kept) | {30} <= set(list_checkpoints(store))
    for step in list_checkpoints(store):
        manifest = load_manifest(store, step)
        assert manifest.metrics == {key: lines[step][key] for key in ("loss", "eval_loss") if key in lines[step]}
        assert ("eval_loss" in manifest.metrics) == (step % 10 == 0)
    for event in committed:
        assert event["seconds"] > 0
        assert event["mb_per_second"] == pytest.approx(event["bytes"] / 1e6 / event["seconds"], rel=0.1)
        assert event["retries"] == {}
    steps = [event["step"] for event in committed]
    gone = [step for event in removed for step in event["steps"]]
    assert sorted(gone + list_checkpoints(store)) == steps


def test_a_tuned_interval_is_recorded_with_its_reasons_and_kept_to(corpus: Path, tmp_path: Path) -> None:
    tuned = ("checkpoint.interval=tuned", "checkpoint.every_steps=3", "checkpoint.min_steps=2")
    job = make_job(corpus, tmp_path, "tuned", "training.steps=40", *tuned, "checkpoint.max_steps=15", "hosts.max=1")
    with LocalJob(job) as run:
        run.start_host("a", "a")
        assert run.finish()["state"] == "finished"
    interval, last, changes = 3, 0, 0
    for event in run.events:
        if event["event"] == "checkpoint_interval":
            measured = Measured(*(event[f"{key}_seconds"] for key in ("cost", "save", "mtbf", "step")))
            assert event["steps"] == interval_steps(measured, 2, 15)
            assert event["before"] == interval
            assert abs(event["steps"] - interval) > 0.2 * interval
            interval, changes = event["steps"], changes + 1
        elif event["event"] == "checkpoint_committed":
            assert event["step"] == 40 or event["step"] - last >= min(interval, 3)
            last = event["step"]
    assert changes  # 3 steps are neither what the save costs nor what it takes
    assert last == 40


def test_ck_11_a_commit_that_is_refused_is_made_soon_again(
    corpus: Path, reference: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-11: all of step 10 is uploaded but its manifest cannot be created; the next steps are saved all the same."""
    create, refused = LocalStore.create, []

    def full(store: LocalStore, path: str, data: bytes) -> None:
        if "/step-" in path and not refused:
            refused.append(path)
            raise StorageError(path, "quota exceeded")
        create(store, path, data)

    monkeypatch.setattr(LocalStore, "create", full)
    job = make_job(corpus, tmp_path, "ck-11", "hosts.max=1", "checkpoint.keep_last=9")
    with LocalJob(job) as run:
        run.start_host("a", "a")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
    (failed,) = run.told("checkpoint_failed")
    assert (failed["step"], "quota exceeded" in failed["detail"]) == (10, True)
    steps = list_checkpoints(job_store(job))
    assert 10 < steps[0] < 20  # not an interval later
    assert steps[-2:] == [20, 30]


def test_ck_11_all_die_before_it_is_made_again_and_the_next_submission_commits_it(
    corpus: Path, reference: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CK-11 with a restart: from step 20 on no manifest can be created; it is gone on from 10, the newest there is."""
    create, refused = LocalStore.create, []

    def full(store: LocalStore, path: str, data: bytes) -> None:
        if "/step-" in path and "/step-00000010-" not in path:
            refused.append(path)
            raise StorageError(path, "quota exceeded")
        create(store, path, data)

    options = ("hosts.max=2", "parallel.pp=1", "checkpoint.keep_last=9")
    job = make_job(corpus, tmp_path, "ck-11-restart", *options)
    with monkeypatch.context() as patch, LocalJob(job) as first:
        patch.setattr(LocalStore, "create", full)
        first.start_hosts("ab")
        first.wait(lambda _: bool(first.told("checkpoint_failed")))
        for name in first.hosts:
            first.kill_host(name)
    (failed, *_) = first.told("checkpoint_failed")
    assert (failed["step"], "quota exceeded" in failed["detail"]) == (20, True)
    assert "/step-00000020-" in refused[0]
    store = job_store(job)
    assert list_checkpoints(store) == [10]
    with LocalJob(job, "run1") as second:
        second.start_hosts("cd")
        assert second.finish()["state"] == "finished"
        assert_same_curve(second.lines("steps"), reference)
    (resumed,) = second.told("resumed")
    assert resumed["step"] == 10
    formed = second.told("generation_formed")[0]
    assert (formed["step"], set(formed["restored_bytes"])) == (10, {"object"})
    assert second.told("checkpoint_failed") == []
    steps = list_checkpoints(store)
    assert {10, 20, 30} <= set(steps)
    assert verify_checkpoint(store, load_manifest(store, 20)) == []


def test_ck_03_killed_when_the_first_object_of_step_20_appears(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    """CK-03: resume from 10, with a word about 20; step 20 asked for is an error that names what is missing."""
    job = make_job(corpus, tmp_path, "ck-03", "hosts.max=1")
    store = job_store(job)
    with LocalJob(job) as first:
        first.start_host("a", "a")
        first.wait(lambda _: bool(store.list("checkpoints/step-00000020-g")))
        first.kill_host("a")
    if list_checkpoints(store) == [10, 20]:  # it was quicker: then as if it had died one call earlier
        store.delete(read_catalog(store).find(20).path)
    with LocalJob(job, "run1") as second:
        (resumed,) = second.told("resumed")
        assert resumed["step"] == 10
        assert any("step 20 is incomplete" in event["detail"] for event in second.told("checkpoint_refused"))
        with pytest.raises(CheckpointError, match=r"checkpoints/step-00000020-c\*\.json is missing"):
            restore_from_checkpoint({}, store, step=20)
        second.start_host("b", "b")
        second.wait_step(11)
        assert second.finish()["state"] == "finished"
        assert_same_curve(second.lines("steps"), reference)
