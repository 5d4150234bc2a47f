"""``ddp``, ``zero1`` and ``zero2``: every rank holds all weights of its stage."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.config.job import Job
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import LocalShard, cuts_of, local_box
from elastic_train.parallel.stages import Stages
from elastic_train.parallel.tensor import tensor_dim


class Replicated:
    """One rank, float32."""

    def __init__(self, stages: Stages, job: Job, mesh: ParallelMesh) -> None:
        for module in stages.modules:
            module.to_empty(device=mesh.device)
            module.tie()
        self.shards_are_cut = False
        self._parameters = dict(stages.named_parameters())
        self.shards: dict[str, LocalShard] = {}
        for name, parameter in self._parameters.items():
            box = local_box(stages.shapes[name], cuts_of(tensor_dim(name), mesh.layout, mesh.place, sharded=False))
            self.shards[name] = LocalShard(parameter.detach(), stages.shapes[name], box.offsets)

    def start_step(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def before_backward(self, last: bool) -> None:
        """Nothing to do."""

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} took no part in the step: it has no gradient")
            gradients[name] = parameter.grad
        return gradients

    def publish(self) -> None:
        """Nothing to do: compute uses the master weights themselves."""

    def release(self) -> None:
        """Nothing to do: nothing is gathered."""
