"""The ``dp_replicate`` and ``dp_shard`` axes: FSDP2, one unit per block and one for the rest.

Weights are gathered once and gradients reduced once per step, whatever the number of micro-batches: one all-gather and
one reduce-scatter per unit and step. A rank therefore holds 8 bytes per parameter of its stage during the step (weight
and gradient, fp32), besides its shard of weights and moments.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from elastic_train.model.transformer import Transformer
from elastic_train.parallel.mesh import ParallelMesh


def apply_data_parallel(model: Transformer, mesh: ParallelMesh) -> None:
    """Shard the parameters of ``model`` over ``dp_shard`` and replicate over ``dp_replicate``, in place.

    Gradients are reduced as plain sums: the loss is already divided by the global number of valid tokens.
    """
    for module in (*model.blocks.values(), model):
        unit = fully_shard(module, mesh=mesh.fsdp, reshard_after_forward=False)
        # Both settings reach one unit only, unlike most of FSDPModule's.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def local_part(tensor: Tensor) -> Tensor:
    """The local storage of an FSDP parameter or gradient; any other tensor as it is. Call it under ``no_grad``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mark_last_backward(model: nn.Module, last: bool) -> None:
    """Say whether the next backward pass ends the step: only then gradients are reduced and weights released."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
