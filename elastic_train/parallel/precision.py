"""The number formats of a job. Master weights and moments are float32 whatever is chosen here."""

from __future__ import annotations

import torch

from elastic_train.config.job import TrainingConfig


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """Of weights and activations in forward and backward; fp8 is a matter of single matrix products inside bf16."""
    return torch.float32 if training.precision == "fp32" else torch.bfloat16


def reduce_dtype(training: TrainingConfig) -> torch.dtype:
    """Of gradients while they are accumulated and reduced."""
    return torch.float32 if training.reduce_dtype == "fp32" else torch.bfloat16
