"""What the ranks of the pipeline tests do."""

from __future__ import annotations

import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model.initialize import fill_initial
from elastic_train.parallel.batches import MicroBatches
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.parallelize import parallelize
from elastic_train.parallel.pipeline import Pipeline
from elastic_train.training.loss import build_loss

MICRO_BATCHES = 4


def evaluate_and_run(rank: int, job: Job, layout: Layout) -> tuple[dict[str, list[float]], bool]:
    """Losses of evaluation and training in several orders, and whether evaluation left a gradient."""
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    model = parallelize(job=job, mesh=mesh)
    for name, shard in model.data.shards.items():
        fill_initial(shard.tensor, name, shard.global_shape, shard.offsets, seed=1, std=0.2)
    model.data.publish()
    loss = build_loss(job.model, mesh)
    pipeline = Pipeline(model.stages, job, mesh, micro_batches=MICRO_BATCHES, loss=loss)
    batches = _batches(job, MICRO_BATCHES)
    found = {"evaluated": pipeline.evaluate(batches)}
    left = any(parameter.grad is not None for _, parameter in model.stages.named_parameters())
    found["more"] = pipeline.evaluate(_batches(job, MICRO_BATCHES + 1))
    found["trained"] = pipeline.run(batches)
    for shard in model.data.shards.values():
        shard.tensor.mul_(0.5)
    model.data.publish()
    found["evaluated with other weights"] = pipeline.evaluate(batches)
    found["trained with other weights"] = pipeline.run(batches)
    return {name: [loss.item() for loss in losses] for name, losses in found.items()}, left


def _batches(job: Job, count: int) -> MicroBatches:
    """The first ``count`` of some random micro-batches. A document ends at each token 0."""
    generator = torch.Generator().manual_seed(0)
    shape = (MICRO_BATCHES + 1, job.training.micro_batch, job.data.sequence_length + 1)
    tokens_MBS = torch.randint(0, 9, shape, generator=generator)[:count]
    ids_MBT = tokens_MBS[..., :-1].contiguous()
    documents_MBS = (ids_MBT == 0).long().cumsum(dim=-1) if job.data.document_mask else None
    return MicroBatches(ids_MBT, tokens_MBS[..., 1:].contiguous(), documents_MBS)
