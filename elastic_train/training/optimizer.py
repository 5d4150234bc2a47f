"""The optimizer of a job, over the local parts of parameters, gradients and moments.

It sees plain tensors: dispatching the updates over DTensors costs a second in the first step.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from elastic_train.config.job import Job
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.precision import compute_dtype
from elastic_train.parallel.shard import LocalShard
from elastic_train.parallel.whole_matrix import WholeMatrices
from elastic_train.training.optimizers.adam import LocalAdam
from elastic_train.training.optimizers.lion import LocalLion
from elastic_train.training.optimizers.muon import LocalMuon, is_matrix_of_block
from elastic_train.training.optimizers.sgd import LocalSGD


class LocalOptimizer(Protocol):
    """Updates the local parts of master weights, in place."""

    state: dict[str, dict[str, Tensor]]
    """Kind of state -> parameter name -> live float32 tensor of the shape of the local part. Zeros at first."""

    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float, scale: float = 1.0) -> None:
        """Update number ``step`` (1-based) with ``scale`` x ``gradients``: local, float32 or bfloat16; read only."""


def build_optimizer(shards: dict[str, LocalShard], job: Job, mesh: ParallelMesh, *, cut: bool) -> LocalOptimizer:
    """The optimizer of the job over ``shards``: live local float32 tensors, may be empty, by name.

    ``cut``: whether the shards are cut over ``mesh.shard_group``. Every rank calls it: Muon makes a process group.
    """
    config, fused = job.optimizer, job.training.determinism == "default"
    parameters = {name: shard.tensor for name, shard in shards.items()}
    if config.name == "sgd":
        return LocalSGD(parameters, config, fused=fused)
    if config.name == "lion":
        return LocalLion(parameters, config)
    if config.name == "muon":
        shapes = {name: shard.global_shape for name, shard in shards.items()}
        matrices = {name: shape for name, shape in shapes.items() if is_matrix_of_block(name, len(shape))}
        whole = WholeMatrices(matrices, mesh, dtype=compute_dtype(job.training), sharded=cut)
        return LocalMuon(shards, config, whole, fused=fused)
    return LocalAdam(parameters, config, decoupled=config.name == "adamw", fused=fused)


def state_kinds(config: OptimizerConfig, name: str, dimensions: int) -> tuple[str, ...]:
    """The kinds of state that the optimizer of ``build_optimizer`` has for parameter ``name`` of so many dims."""
    if config.name == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    if config.name == "lion":
        return ("exp_avg",)
    if config.name == "muon" and is_matrix_of_block(name, dimensions):
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq")
