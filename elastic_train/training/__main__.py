"""The engine alone, under torchrun: no ray, no mlflow, no checkpoints. One JSON line per step on rank 0.

torchrun --nproc-per-node N -m elastic_train.training JOB.yaml [section.field=value ...]
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.config.load import load_job
from elastic_train.data.errors import DataError
from elastic_train.data.evaluation import open_evaluation
from elastic_train.data.sources import open_training
from elastic_train.model.hf_folder import HfFolder, check_tokenizer, open_source
from elastic_train.planner.layouts import NoLayout, choose_for_all
from elastic_train.storage.errors import StorageError
from elastic_train.training.engine import Engine

USAGE = "usage: torchrun --nproc-per-node N -m elastic_train.training JOB.yaml [section.field=value ...]"


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 2 for an error of the user, found before anything is computed."""
    if not arguments or "RANK" not in os.environ:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        job = load_job(arguments[0], arguments[1:])
        source = open_source(job)
        engine = _build(job, source)
    except (ConfigError, DataError, StorageError, NoLayout) as error:
        if os.environ["RANK"] == "0":
            print(error, file=sys.stderr)
        return 2
    try:
        _run(engine, job, source)
    finally:
        dist.destroy_process_group()
    return 0


def _build(job: Job, source: HfFolder | None) -> Engine:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    choice = choose_for_all(job, world)
    data = open_training(job)
    if source is not None:
        check_tokenizer(source, data.tokenizer_sha256, job.data.first_uri)
    evaluation = open_evaluation(job, data.datasets[0].manifest)
    if job.hosts.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(job.hosts.threads)
    dist.init_process_group("nccl" if job.hosts.device == "cuda" else "gloo")
    return Engine(job, choice.layout, rank, data.batches, evaluation)


def _run(engine: Engine, job: Job, source: HfFolder | None) -> None:
    engine.initialize(source)
    for step in range(1, job.training.steps + 1):
        start = time.perf_counter()
        metrics = engine.train_step(step)
        seconds = time.perf_counter() - start - engine.evaluation_seconds
        line = {name: value for name, value in asdict(metrics).items() if value is not None}
        line["seconds"] = round(seconds, 4)
        if metrics.evaluation():
            line["eval_seconds"] = round(engine.evaluation_seconds, 4)
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: now and then a thread of a process group is still there, and aborts what is done.
    os._exit(code)
