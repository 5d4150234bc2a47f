"""The whole of N-dimensional training on one screen: which axis acts on the model, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.compile import apply_compile
from elastic_train.parallel.context import apply_context_parallel
from elastic_train.parallel.data import DataParallel, apply_data_parallel
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.pipeline import stage_layers
from elastic_train.parallel.recompute import recompute_attention, recompute_blocks
from elastic_train.parallel.stages import Stages, stages_of
from elastic_train.parallel.tensor import apply_tensor_parallel


@dataclass(frozen=True)
class ParallelModel:
    """One rank's stages, and what the data axes make of their parameters."""

    stages: Stages
    data: DataParallel


def parallelize(*, job: Job, mesh: ParallelMesh) -> ParallelModel:
    """Cut the model along every axis; the parameters are on ``mesh.device``, with uninitialised values."""
    layout, place = mesh.layout, mesh.place
    model = Transformer(
        job.model,
        layers=stage_layers(job.model.num_hidden_layers, layout.pp, place.pp),
        first=place.pp == 0,
        last=place.pp == layout.pp - 1,
    )
    model.sequence_length = job.data.sequence_length
    stages = stages_of([model])
    for stage in stages.modules:
        # Tensor parallelism first: sharding then cuts what each tensor rank is left with, and gathers only that.
        if layout.tp > 1:
            apply_tensor_parallel(stage, mesh)
        if layout.cp > 1:
            apply_context_parallel(stage, job, mesh)
        # Compiled code leaves attention out, and is itself run again where blocks are.
        if job.training.recompute == "selective":
            recompute_attention(stage)
        if job.training.compile:
            apply_compile(stage, mesh.device)
        if job.training.recompute == "full":
            recompute_blocks(stage)
    return ParallelModel(stages, apply_data_parallel(stages, job, mesh))
