"""CPU memory that ranks need whose state is there (``parallel.offload``), to be held against that of their node.

What FSDP2's ``CPUOffloadPolicy`` keeps there: float32 master weights and gradients in pinned memory, which torch hands
out in powers of two, tensor by tensor (``CachingHostAllocator``); optimizer state and averaged weights as they are. And
the update's float32 copies of the gradients that it clips. Not counted: images of snapshots, which are files in memory,
and what is read ahead of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.sizes import gib
from elastic_train.planner.activations import FLOAT32
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.model_state import model_state, numbers_of
from elastic_train.planner.parameters import StageParameters, stages_of_ranks

PROCESS = 4 * 2**30
"""A trainer with torch, CUDA and NCCL; a round number, not measured."""


def host_terms(job: Job, layout: Layout, stages: Sequence[StageParameters]) -> dict[str, int]:
    """Term -> bytes of CPU memory of a rank with ``stages``; {} without ``parallel.offload``."""
    if not job.parallel.offload:
        return {}
    state = model_state(job, layout, stages)
    whole, gradients = (
        sum(stage.blocks * stage.block.pinned + stage.outer.pinned for stage in each)
        for each in (stages, [stage.trained for stage in stages])
    )
    # Frozen weights have the bytes of compute, half or all of a float32's: the next smaller power of two.
    frozen = (whole - gradients) * numbers_of(job).compute // FLOAT32
    clipped = max(max(stage.trained.block.whole, stage.trained.outer.largest) for stage in stages)
    terms = {
        "master weights, pinned": gradients + frozen,
        "gradients, pinned": gradients,
        "optimizer state": state.get("optimizer state", 0),
        "averaged weights": state.get("averaged weights", 0),
        "gradients in float32": FLOAT32 * -(-clipped // layout.shards),
        "process": PROCESS,
    }
    return {term: size for term, size in terms.items() if size}


def node_bytes(job: Job, layout: Layout, per_node: int) -> int:
    """Bytes of CPU memory that the ranks of a node of ``per_node`` need, as if all were those that need most."""
    ranks = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length, job.lora)
    different = {tuple((stage.blocks, stage.first, stage.last) for stage in stages): stages for stages in ranks}
    most = max(sum(host_terms(job, layout, stages).values()) for stages in different.values())
    return min(layout.world_size, per_node) * most


def host_problem(job: Job, layout: Layout, accelerator: Accelerator) -> str | None:
    """That a node's CPUs have too little memory for what is offloaded to them; None: they have enough."""
    if not job.parallel.offload:
        return None
    needed, limit = node_bytes(job, layout, accelerator.per_node), accelerator.host_memory_bytes
    if needed <= limit:
        return None
    ranks = min(layout.world_size, accelerator.per_node)
    each = f"{ranks} ranks of {gib(needed / ranks)}" if ranks > 1 else "1 rank"
    return (
        f"{layout} with parallel.offload=true needs {gib(needed)} of CPU memory on a node ({each}), and a node of "
        f"{accelerator.name} has {gib(limit)}"
    )
