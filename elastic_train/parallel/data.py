"""The data axes: what ranks that see different tokens do with weights and gradients (``parallel.data``)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from elastic_train.config.job import Job
from elastic_train.parallel.fsdp import FullySharded
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.replicated import Replicated
from elastic_train.parallel.shard import LocalShard
from elastic_train.parallel.stages import Stages


class DataParallel(Protocol):
    """Holds the float32 master weights of a rank, and brings gradients to where the optimizer needs them.

    Parameters go by their state name (HF name, global layer number). Gradients are sums over all ranks that see
    different tokens: the loss is already divided by the global number of valid tokens.
    """

    shards: dict[str, LocalShard]
    """This rank's live part of every master weight, contiguous, float32; frozen ones in the precision of compute."""
    trained: dict[str, LocalShard]
    """Those of them that are not frozen."""
    shards_are_cut: bool
    """Whether the shards (and so gradients and moments) are cut over ``dp_shard`` x ``cp``."""

    def start_step(self) -> None:
        """Forget the gradients of the step before."""

    def before_backward(self, last: bool) -> None:
        """Called before the backward pass of each micro-batch; a pipeline schedule does without."""

    def gradients(self) -> dict[str, Tensor]:
        """After all backward passes: the gradient of every trained shard, live, float32 or of the reduce dtype.

        Waits for reductions under way. Raises RuntimeError for a parameter without a gradient.
        """

    def publish(self, *, frozen: bool = True) -> None:
        """Make the weights that compute uses follow the master weights, after these were written.

        ``frozen``: whether those were written as well that are not trained.
        """

    def release(self) -> None:
        """Drop gathered weights after forward passes without a backward pass, which would have done so."""


def apply_data_parallel(stages: Stages, job: Job, mesh: ParallelMesh) -> DataParallel:
    """Allocate the parameters of ``stages`` on ``mesh.device``, uninitialised, the way ``parallel.data`` says."""
    alone = mesh.layout.dp_replicate * mesh.layout.shards == 1
    if job.parallel.data in ("zero3", "hsdp") and (not alone or job.parallel.offload):
        return FullySharded(stages, job, mesh)
    return Replicated(stages, job, mesh)
