"""The whole of N-dimensional training on one screen: which axis acts on the model, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.model.lora import apply_lora
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.compile import apply_compile
from elastic_train.parallel.context import apply_context_parallel
from elastic_train.parallel.data import DataParallel, apply_data_parallel
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.precision import apply_precision
from elastic_train.parallel.recompute import recompute_attention, recompute_blocks
from elastic_train.parallel.stages import Stages, stages_of
from elastic_train.parallel.tensor import apply_tensor_parallel
from elastic_train.planner.stage_split import layer_costs, split_layers, stages_of_rank, total_stages


@dataclass(frozen=True)
class ParallelModel:
    """One rank's stages, and what the data axes make of their parameters."""

    stages: Stages
    data: DataParallel


def parallelize(*, job: Job, mesh: ParallelMesh) -> ParallelModel:
    """Cut the model along every axis; the parameters are on ``mesh.device``, with uninitialised values."""
    stages = stages_of(_stage_modules(job, mesh))
    for stage in stages.modules:
        apply_precision(stage, job.training, mesh.device)
        # Tensor parallelism first: sharding then cuts what each tensor rank is left with, and gathers only that.
        if mesh.layout.tp > 1:
            apply_tensor_parallel(stage, mesh)
        if mesh.layout.cp > 1:
            apply_context_parallel(stage, job, mesh)
        # Compiled code leaves attention out, and is itself run again where blocks are.
        if job.training.recompute == "selective":
            recompute_attention(stage)
        if job.training.compile:
            apply_compile(stage, mesh.device)
        if job.training.recompute == "full":
            recompute_blocks(stage)
    return ParallelModel(stages, apply_data_parallel(stages, job, mesh))


def _stage_modules(job: Job, mesh: ParallelMesh) -> list[Transformer]:
    """This rank's pipeline stages, in the order of their place in the model; the whole model without pipeline."""
    pp, place, model, length = mesh.layout.pp, mesh.place.pp, job.model, job.data.sequence_length
    count = total_stages(job.parallel, pp)
    layers = split_layers(model.num_hidden_layers, count, layer_costs(model, length))
    modules = [
        Transformer(model, layers=layers[stage], first=stage == 0, last=stage == count - 1)
        for stage in stages_of_rank(job.parallel, pp, place)
    ]
    for module in modules:
        module.sequence_length = length
        apply_lora(module, job.lora)
    return modules
