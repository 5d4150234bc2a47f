"""What an uninterrupted run of a job computes, without a controller."""

from __future__ import annotations

from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.sources import open_training
from elastic_train.model.hf_folder import open_source
from elastic_train.training.engine import Engine


def uninterrupted(rank: int, job: Job) -> list[dict[str, Any]]:
    """Lines as in steps.jsonl, of all steps on one rank."""
    batches = open_training(job).batches
    engine = Engine(job, Layout(), rank, batches)
    engine.initialize(open_source(job))
    lines = []
    for step in range(1, job.training.steps + 1):
        metrics = engine.train_step(step)
        line = {"step": step, "samples": batches.sample_ids(step), "loss": metrics.loss, "lr": metrics.lr}
        line |= {"slots": [[engine.slots.start, engine.slots.stop]], "batch": engine.batch_digest}
        lines.append(line | {"grad_norm": metrics.grad_norm, "valid_tokens": metrics.valid_tokens})
    return lines
