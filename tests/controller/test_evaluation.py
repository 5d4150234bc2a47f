"""Evaluation and averaged weights in whole jobs: in steps.jsonl and MLflow, and through the loss of a trainer."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.controller.checkpoint_evaluation import evaluate_checkpoint
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.tracking_feed import TrackingFeed
from elastic_train.storage.store import Store
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

pytestmark = pytest.mark.slow

STEPS = (
    "training.steps=8",
    "schedule.warmup_steps=2",
    "training.ema_decay=0.9",
    "evaluation.every_steps=3",
    "evaluation.samples=7",
)


def test_evaluations_are_the_same_after_a_trainer_is_lost(corpus: Path, tmp_path: Path) -> None:
    """Muon's state and the average go through snapshots; the uninterrupted run has one host."""
    overrides = (*STEPS, f"evaluation.uri='{corpus}'", "optimizer={name: muon, learning_rate: 1e-3}", "parallel.pp=1")
    alone = make_job(corpus, tmp_path, "alone", *overrides, "hosts.max=1")
    with LocalJob(alone) as run:
        run.start_host("only", "node")
        assert run.finish()["state"] == "finished"
        expected = run.lines("steps")
    evaluated_twice(alone, expected[-1])
    assert [line["step"] for line in expected if "eval_loss" in line] == [3, 6, 8]
    assert all("eval_seconds" in line and "eval_loss_ema" in line for line in expected if "eval_loss" in line)
    with LocalJob(make_job(corpus, tmp_path, "moved", *overrides, "hosts.min=2", "hosts.max=2")) as run:
        for name in ("a", "b"):
            run.start_host(name, name)
        run.wait_step(4)
        os.kill(run.trainer_pids()[-1], signal.SIGKILL)
        assert run.finish()["state"] == "finished"
        lines = run.lines("steps")
    assert_same_curve(lines, expected, tolerance=1e-4)
    for line, other in zip(lines, expected, strict=True):
        assert ("eval_loss" in line) == ("eval_loss" in other)
        for key in ("eval_loss", "eval_loss_ema"):
            assert math.isclose(line.get(key, 0.0), other.get(key, 0.0), rel_tol=1e-4)


def evaluated_twice(job: Job, line: dict[str, Any]) -> None:
    """As ``elastic-train evaluate`` does: the losses of the step's line, and no thread is left that could abort it."""
    store = Store.open(f"{job.storage.uri}/{job.name}")
    threads = []
    for _ in range(2):  # the first one starts the threads that torch keeps
        losses = evaluate_checkpoint(job, store, line["step"])
        threads.append(set(os.listdir("/proc/self/task")))
    assert losses == pytest.approx({key: line[key] for key in ("eval_loss", "eval_loss_ema")}, rel=1e-5)
    assert threads[1] == threads[0]


def test_evaluations_go_to_mlflow(corpus: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    job = make_job(corpus, tmp_path, "tracked", "tracking.enabled=true", f"tracking.uri='{uri}'")
    asyncio.run(track(job, {1: {}, 2: {"eval_loss": 2.5, "eval_loss_ema": 2.75, "eval_seconds": 0.5}, 3: {}}))
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("elastic_train")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    for key, value in {"eval_loss": 2.5, "eval_loss_ema": 2.75, "eval_seconds": 0.5}.items():
        points = client.get_metric_history(parent.info.run_id, key)
        assert [(point.step, point.value) for point in points] == [(2, value)]


async def track(job: Job, evaluations: dict[int, dict[str, float]]) -> None:
    folder = JobFolder(job)
    folder.open("digest")
    feed = TrackingFeed(job)
    feed.start(folder)
    line = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "valid_tokens": 256, "seconds": 1.0}
    line |= {"snapshot_seconds": 0.0, "stall_seconds": 0.0, "data_seconds": 0.0}
    line |= {"generation": 1, "time": 1_700_000_000.0}
    for step, evaluation in evaluations.items():
        feed.on_event({"event": "step", "step": step} | line | evaluation)
    await feed.close("finished")
    folder.close()
