"""What the ranks of ``test_pretrained`` and of the round trips do."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model.hf_folder import open_source
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.parallelize import parallelize
from elastic_train.training.engine import Engine
from elastic_train.training.pretrained import load_pretrained
from tests.training.runs import Piece, pieces
from tests.training.synthetic import SyntheticBatches


def start(rank: int, job: Job, layout: Layout, steps: int) -> tuple[list[float], dict[str, Piece]]:
    """Begin with the weights of ``init_from``, train ``steps`` steps: loss of each and of the next, and the state."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    for shard in engine.state().values():
        shard.tensor.fill_(7.0)
    engine.initialize(open_source(job))
    losses = [engine.train_step(step).loss for step in range(1, steps + 1)]
    return [*losses, engine.compute_gradients(steps + 1).loss], pieces(engine)


def peak_of_import(rank: int, job: Job, layout: Layout) -> int:
    """Bytes by which importing raised this process's peak of resident memory, its shards of the weights included.

    Before it the shards are allocated, but no page of them has been touched.
    """
    model = parallelize(job=job, mesh=ParallelMesh(layout, rank, torch.device("cpu")))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    folder = open_source(job)
    assert folder is not None
    load_pretrained(folder, model.data.shards)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024
