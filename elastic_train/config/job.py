"""The job file: one pydantic model per component, each checked where it is defined.

Sizes are in sequences (``global_batch``, ``micro_batch``), tokens (``sequence_length``) or optimizer steps
(everything named ``*steps``); times are in seconds. Steps are counted from 1: step ``t`` is the ``t``-th update.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from elastic_train.config.data import DataConfig, EvaluationConfig
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.config.operation import (
    CheckpointConfig,
    FailureConfig,
    HostsConfig,
    LogConfig,
    SnapshotConfig,
    StorageConfig,
    TrackingConfig,
)
from elastic_train.config.optimizer import OptimizerConfig, ScheduleConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.section import Problems, Section
from elastic_train.config.training import TrainingConfig


def _neighbours(value: int, step: int) -> str:
    """The multiples of ``step`` around ``value``, e.g. ``16, 32``."""
    below = value // step * step
    return ", ".join(str(multiple) for multiple in (below, below + step) if multiple)


class Job(Section):
    """A whole job file."""

    name: str = Field(description="resubmitting the name resumes the job")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(default=1, description="of initial weights and sample order")
    init_from: str | None = Field(
        default=None, description="folder of an HF checkpoint whose weights the job starts from; null: random weights"
    )
    model: ModelConfig
    lora: LoraConfig | None = None
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    parallel: ParallelConfig = ParallelConfig()
    hosts: HostsConfig = HostsConfig()
    storage: StorageConfig = StorageConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    failure: FailureConfig = FailureConfig()
    tracking: TrackingConfig = TrackingConfig()
    log: LogConfig = LogConfig()

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
            raise ValueError("use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit")
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems = [*self._batch_problems(), *self._schedule_problems(), *self._device_problems()]
        problems += self._lora_problems()
        if problems:
            raise Problems(problems)
        return self

    def _batch_problems(self) -> list[str]:
        total, micro = self.training.global_batch, self.training.micro_batch
        tokens, length = self.training.global_tokens, self.data.sequence_length
        if tokens is not None and tokens != total * length:
            return [
                f"training.global_tokens={tokens}: must be training.global_batch x data.sequence_length = "
                f"{total} x {length}; nearest: {_neighbours(tokens, length * micro)}"
            ]
        if total % micro == 0:
            return []
        text = (
            f"training.global_batch={total}: must be a multiple of training.micro_batch={micro}; "
            f"nearest: {_neighbours(total, micro)}"
        )
        data_ranks = [size for size in (self.parallel.dp_replicate, self.parallel.dp_shard) if isinstance(size, int)]
        ranks = math.prod(data_ranks)
        if ranks > 1:
            text += (
                f"; for equal work on {ranks} data ranks a multiple of micro_batch x data ranks = {micro * ranks}: "
                f"{_neighbours(total, micro * ranks)}"
            )
        return [text]

    def _schedule_problems(self) -> list[str]:
        problems = []
        if self.schedule.warmup_steps > self.training.steps:
            problems.append(
                f"schedule.warmup_steps={self.schedule.warmup_steps}: must be at most "
                f"training.steps={self.training.steps}"
            )
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_steps or 0
        if warmup <= self.training.steps < warmup + decay:
            problems.append(
                f"schedule.decay_steps={decay}: must be at most training.steps - schedule.warmup_steps = "
                f"{self.training.steps} - {warmup} = {self.training.steps - warmup}"
            )
        if self.schedule.min_lr > self.optimizer.learning_rate:
            problems.append(
                f"schedule.min_lr={self.schedule.min_lr}: must be at most "
                f"optimizer.learning_rate={self.optimizer.learning_rate}"
            )
        optimizer = self.optimizer
        if optimizer.learning_rate * optimizer.weight_decay >= 1:
            problems.append(
                f"optimizer.weight_decay={optimizer.weight_decay}: times "
                f"optimizer.learning_rate={optimizer.learning_rate} must be below 1: a step may not take a whole weight"
            )
        if self.data.sequence_length > self.model.max_position_embeddings:
            problems.append(
                f"data.sequence_length={self.data.sequence_length}: must be at most "
                f"model.max_position_embeddings={self.model.max_position_embeddings}"
            )
        return problems

    def _device_problems(self) -> list[str]:
        problems = []
        if self.parallel.offload and self.training.determinism == "exact":
            problems.append(
                "parallel.offload=true is not available with training.determinism=exact, whose sums of gradients are "
                "on the device; use determinism=default"
            )
        if self.hosts.device == "cuda":
            return problems
        if self.training.precision == "fp8":
            problems.append("training.precision=fp8: needs hosts.device=cuda with fp8 units; use bf16 or fp32 on cpu")
        if self.parallel.offload:
            problems.append("parallel.offload=true: needs hosts.device=cuda; on cpu the state is in CPU memory already")
        return problems

    def _lora_problems(self) -> list[str]:
        if self.lora is None:
            return []
        problems = []
        if self.init_from is None:
            problems.append("lora: needs init_from, the model that it adapts; random weights have to be trained")
        if self.optimizer.name == "muon":
            problems.append(
                "optimizer.name=muon: is not available with lora, as it makes all directions of a matrix equally "
                "strong; use adamw"
            )
        if self.training.precision == "fp8":
            problems.append("training.precision=fp8: is not available with lora, whose matrices are narrow; use bf16")
        return problems

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values; ``Job.model_validate(job.as_dict(), strict=False)`` gives the job back."""
        return self.model_dump(mode="json")
