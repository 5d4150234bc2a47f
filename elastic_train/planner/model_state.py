"""Weights, gradients and optimizer state that a rank holds between two steps, as this engine divides them.

The table of docs/parallelism.md, tensor by tensor: uneven parts, padding, and the first rank of every axis, which holds
most. Exact: the tests build the engine on a fake process group over tensors without data and compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.planner.activations import FLOAT32
from elastic_train.planner.parameters import StageParameters

Division = Literal["none", "optimizer", "gradients", "all"]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Bytes of a number in compute, and of a gradient while it is accumulated and reduced."""

    compute: int
    gradient: int

    @property
    def separate_master(self) -> bool:
        """Whether the float32 master weights are others than those that compute uses."""
        return self.compute != FLOAT32


def numbers_of(job: Job) -> Numbers:
    training = job.training
    return Numbers(FLOAT32 if training.precision == "fp32" else 2, FLOAT32 if training.reduce_dtype == "fp32" else 2)


def division(job: Job, layout: Layout) -> Division:
    """What is cut over ``dp_shard x cp``; strategies that have nobody to share with hold everything whole."""
    return divided(job.parallel.data, layout.dp_replicate, layout.shards, offload=job.parallel.offload)


def divided(data: str, replicas: int, shards: int, *, offload: bool) -> Division:
    """``division`` by a strategy's name, without a job."""
    if data in ("zero3", "hsdp"):
        return "all" if replicas * shards > 1 or offload else "none"
    if shards == 1 or data == "ddp":
        return "none"
    return "optimizer" if data == "zero1" else "gradients"


def model_state(job: Job, layout: Layout, stages: Sequence[StageParameters]) -> dict[str, int]:
    """Term -> bytes of a rank with ``stages``, between two steps. Terms that take nothing are left out.

    With ``precision: fp32`` the weights are their own masters. Sharded weights (``zero3``, ``hsdp``) are float32
    masters only: copies for compute exist while they are gathered. Frozen weights are in the precision of compute, and
    have nothing beside them.
    """
    numbers, cut = numbers_of(job), division(job, layout)
    trained = [stage.trained for stage in stages]
    own = sum(stage.whole if cut == "none" else stage.part for stage in trained)
    frozen = sum(stage.part for stage in stages) - own if cut == "all" else 0
    terms = {
        "weights": numbers.compute * (frozen if cut == "all" else sum(stage.whole for stage in stages)),
        "gradients": _gradient_bytes(job, trained, cut, numbers),
        "master weights": FLOAT32 * own if cut == "all" or numbers.separate_master else 0,
        "optimizer state": _optimizer_bytes(job, trained, cut),
        "averaged weights": FLOAT32 * own if job.training.ema_decay is not None else 0,
    }
    return {term: size for term, size in terms.items() if size}


def _gradient_bytes(job: Job, stages: Sequence[StageParameters], cut: Division, numbers: Numbers) -> int:
    if job.training.determinism == "exact":
        return 8 * sum(stage.whole if cut == "none" else stage.padded for stage in stages)
    if cut == "all":
        return FLOAT32 * sum(stage.part for stage in stages)  # FSDP2 casts what it reduced to the master's precision
    return numbers.gradient * sum(stage.part if cut == "gradients" else stage.whole for stage in stages)


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes of optimizer state per parameter (docs/parallelism.md)."""

    matrix: int
    """of a matrix of a block, as nearly all parameters are"""
    other: int


def moments_of(optimizer: OptimizerConfig) -> Moments:
    """All of them are float32. Muon has one for a matrix, and Adam's two for what is none."""
    numbers = {"adamw": (2, 2), "adam": (2, 2), "lion": (1, 1), "muon": (1, 2), "sgd": (1, 1)}
    matrix, other = (0, 0) if optimizer.name == "sgd" and not optimizer.momentum else numbers[optimizer.name]
    return Moments(FLOAT32 * matrix, FLOAT32 * other)


def _optimizer_bytes(job: Job, stages: Sequence[StageParameters], cut: Division) -> int:
    each, whole = moments_of(job.optimizer), cut == "none"
    elements = sum(stage.whole if whole else stage.part for stage in stages)
    matrices = sum(stage.blocks * (stage.block.matrices if whole else stage.block.matrices_part) for stage in stages)
    return each.other * (elements - matrices) + each.matrix * matrices
