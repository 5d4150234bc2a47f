"""The loss of a committed checkpoint of any layout on held-out data, computed by this process alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.restore_checkpoint import restore_from_checkpoint
from elastic_train.config.job import Job
from elastic_train.config.parallel import ParallelConfig
from elastic_train.data.errors import DataError
from elastic_train.data.evaluation import open_evaluation
from elastic_train.data.sources import open_training
from elastic_train.planner.layouts import choose_for_all
from elastic_train.storage.store import Store
from elastic_train.training.ema import KIND
from elastic_train.training.engine import Engine


def evaluate_checkpoint(job: Job, store: Store, step: int) -> dict[str, float]:
    """``eval_loss``, and ``eval_loss_ema`` for a job with averaged weights: means over the valid tokens.

    ``store`` is the folder of ``job``, whose ``evaluation`` says on what. Only weights are read; memory is needed for
    the whole state of the job, 16 bytes per parameter with adamw. Raises DataError when the data do not fit,
    CheckpointError or DamagedChunk when the checkpoint cannot be loaded, StorageError.
    """
    alone = job.model_copy(update={"parallel": ParallelConfig()})
    data = open_training(alone)
    evaluation = open_evaluation(alone, data.datasets[0].manifest)
    if evaluation is None:
        raise DataError(f"job {job.name} has no evaluation.uri; say on which data it is to be evaluated")
    with _group_of_one(job.hosts.device):
        return _losses(Engine(alone, choose_for_all(alone, 1).layout, 0, data.batches, evaluation), store, step)


def _losses(engine: Engine, store: Store, step: int) -> dict[str, float]:
    weights = {key: shard for key, shard in engine.state().items() if key.startswith(("param.", f"{KIND}."))}
    if restore_from_checkpoint(weights, store, step=step) is None:
        raise CheckpointError(f"{store.uri} has no committed checkpoint")
    engine.publish()
    return engine.evaluations()


@contextmanager
def _group_of_one(device: str) -> Iterator[None]:
    """The engine's collectives need a process group, also when there is nobody to talk to."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # The engine's groups have threads; one that is still there when the interpreter ends aborts the process.
        gc.collect()
