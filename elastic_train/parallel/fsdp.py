"""``zero3`` and ``hsdp``: FSDP2, one unit per block and one for the rest.

By default weights are gathered once and gradients reduced once per step, whatever the number of micro-batches: one
all-gather and one reduce-scatter per unit and step; a rank then holds all weights and gradients of its stage during the
step. With ``reshard_after_forward`` weights are released after each use and gradients reduced in every micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from elastic_train.config.job import Job
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.precision import compute_dtype, freeze_in, reduce_dtype
from elastic_train.parallel.shard import LocalShard, cuts_of, local_box
from elastic_train.parallel.stages import Stages
from elastic_train.parallel.tensor import tensor_dim


class FullySharded:
    """Weights, gradients and moments are cut over ``dp_shard`` x ``cp`` and replicated over ``dp_replicate``."""

    def __init__(self, stages: Stages, job: Job, mesh: ParallelMesh) -> None:
        self._modules = stages.modules
        self._roots = [_shard(module, job, mesh) for module in stages.modules]
        self.shards_are_cut = True
        self._keep = not job.parallel.reshard_after_forward
        self._parameters = dict(stages.named_parameters())
        self.shards = {name: _local_shard(name, stages, self._parameters[name], mesh) for name in self._parameters}
        self.trained = {name: self.shards[name] for name in stages.trained}

    def start_step(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def before_backward(self, last: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(last)
            if self._keep:
                # Only the last backward pass reduces the gradients and releases the weights.
                root.set_requires_gradient_sync(last)
                root.set_reshard_after_backward(last)

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for name in self.trained:
            parameter = self._parameters[name]
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} took no part in the step: it has no gradient")
            gradients[name] = _local(parameter.grad)
        return gradients

    def publish(self, *, frozen: bool = True) -> None:
        """Nothing to do: weights are gathered anew in every step."""

    def release(self) -> None:
        for stage in self._modules:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _shard(module: Transformer, job: Job, mesh: ParallelMesh) -> FSDPModule:
    parallel = job.parallel
    # Inputs are not cast: token ids, and activations that have the precision of compute already.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype(job.training), reduce_dtype=reduce_dtype(job.training), cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy() if parallel.offload else OffloadPolicy()
    units: list[FSDPModule] = []
    freeze_in(module, compute_dtype(job.training))
    for part in (*module.blocks.values(), module):
        # What is outside the blocks is needed at both ends of the forward pass and first in the backward pass.
        release = parallel.reshard_after_forward and part is not module
        unit = fully_shard(
            part, mesh=mesh.fsdp, reshard_after_forward=release, mp_policy=precision, offload_policy=offload
        )
        # Both settings reach one unit only, unlike most of FSDPModule's.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        units.append(unit)
    *blocks, root = units
    _prefetch(root, blocks, parallel.prefetch)
    # Memory is allocated last, so that no rank ever holds more than its own part.
    module.to_empty(device=torch.device("cpu") if parallel.offload else mesh.device)
    module.tie()
    return root


def _prefetch(root: FSDPModule, blocks: list[FSDPModule], depth: int) -> None:
    """Every unit asks for the weights of the ``depth`` blocks that come after it, in either direction."""
    for index, unit in enumerate([root, *blocks]):
        unit.set_modules_to_forward_prefetch(blocks[index : index + depth])
    for index, unit in enumerate([root, *reversed(blocks)]):
        following = list(reversed(blocks))[index : index + depth]
        # Left without a list torch prefetches one unit; a list of the unit itself, which is there, prefetches none.
        unit.set_modules_to_backward_prefetch(following or [unit])


def _local_shard(name: str, stages: Stages, parameter: nn.Parameter, mesh: ParallelMesh) -> LocalShard:
    """Raises RuntimeError if torch holds another part than the rank's place says."""
    local = _local(parameter.detach())
    box = local_box(stages.shapes[name], cuts_of(tensor_dim(name), mesh.layout, mesh.place, sharded=True))
    if tuple(local.shape) != box.sizes and (local.numel() or math.prod(box.sizes)):
        raise RuntimeError(f"{name}: torch holds a part of shape {tuple(local.shape)}, its place says {box.sizes}")
    if not local.is_contiguous():
        raise RuntimeError(f"{name}: the local part is not contiguous (strides {local.stride()})")
    return LocalShard(local, stages.shapes[name], box.offsets)


def _local(tensor: Tensor) -> Tensor:
    """The local storage of an FSDP parameter or gradient. Call it under ``no_grad``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
