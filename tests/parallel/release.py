"""What the ranks of the release test do."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.parallelize import parallelize


@torch.no_grad()
def gathered(rank: int, job: Job, layout: Layout) -> tuple[int, int]:
    """Parameters held whole after a forward pass without gradients, and after their release."""
    model = parallelize(job=job, mesh=ParallelMesh(layout, rank, torch.device("cpu")))
    (stage,) = model.stages.modules
    for shard in model.data.shards.values():
        shard.tensor.zero_()
    stage(torch.zeros(1, job.data.sequence_length, dtype=torch.int64))
    counts = []
    for release in (False, True):
        if release:
            model.data.release()
        counts.append(sum(not isinstance(parameter, DTensor) for parameter in stage.parameters()))
    return counts[0], counts[1]
