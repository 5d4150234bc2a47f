"""What the ranks of the tests of ``training.compile`` do."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches


def compiled_graphs(rank: int, job: Job, layout: Layout) -> tuple[int, int]:
    """Graphs compiled in three steps, and those of them that were compiled after the first step."""
    torch._dynamo.reset()
    counters.clear()
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    engine.train_step(1)
    first = counters["stats"]["unique_graphs"]
    engine.train_step(2)
    engine.train_step(3)
    return counters["stats"]["unique_graphs"], counters["stats"]["unique_graphs"] - first
