"""How long the update of the weights takes: a matter of memory, but for muon's products."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.model_state import division, moments_of
from elastic_train.planner.parameters import StageParameters, block_parameters

NEWTON_SCHULZ = 5
"""steps"""


def update_seconds(
    job: Job, layout: Layout, stages: Sequence[StageParameters], accelerator: Accelerator, efficiency: float
) -> float:
    """Of one rank, all of whose tensors are read, and written, once; frozen ones are not.

    The norm reads gradients; the optimizer reads gradients, reads and writes master weights and state; the average
    reads weights, reads and writes itself; weights in another precision are written. With ``parallel.offload`` all of
    that is in CPU memory, and the CPU's work.
    """
    training, parallel = job.training, job.parallel
    cut = parallel.data != "ddp" and layout.shards > 1
    elements = sum(stage.trained.part if cut else stage.trained.whole for stage in stages)
    # FSDP2 casts what it has reduced to the precision of the master weights (``model_state.model_state``).
    gradient = 4 if training.reduce_dtype == "fp32" or division(job, layout) == "all" else 2
    each = 2 * gradient + 2 * (4 + moments_of(job.optimizer).matrix) + (12 if training.ema_decay is not None else 0)
    copy = 0 if training.precision == "fp32" else 2
    bandwidth = accelerator.host_memory_bytes_per_second if parallel.offload else accelerator.memory_bytes_per_second
    moved = elements * (each + (0 if parallel.offload else copy)) / (bandwidth * accelerator.transfer_efficiency)
    return moved + (_orthogonalising(job, layout, stages, accelerator, efficiency) if _is_muon(job) else 0.0)


def _is_muon(job: Job) -> bool:
    return job.optimizer.name == "muon"


def _orthogonalising(
    job: Job, layout: Layout, stages: Sequence[StageParameters], accelerator: Accelerator, efficiency: float
) -> float:
    """Newton-Schulz on whole matrices, which the ranks of a stage share out (arXiv:2502.16982).

    Of an A x B matrix with A <= B a step multiplies A x B by B x A, A x A by A x A and A x A by A x B.
    """
    flops = 0
    for parameter in block_parameters(job.model):
        if len(parameter.shape) == 2:
            short, long = sorted(parameter.shape)
            flops += NEWTON_SCHULZ * 2 * (2 * short**2 * long + short**3)
    flops *= sum(stage.blocks for stage in stages)
    precision = "fp32" if job.training.precision == "fp32" else "bf16"
    return flops / (layout.world_size // layout.pp) / (accelerator.peak(precision) * efficiency)
