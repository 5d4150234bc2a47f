"""The number formats of a job. Master weights that are trained, and moments, are float32 whatever is chosen here."""

from __future__ import annotations

import torch

from elastic_train.config.training import TrainingConfig
from elastic_train.model.transformer import Transformer

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of the first CUDA devices with fp8 units (Ada; Hopper is 9.0)."""


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """Of weights and activations in forward and backward; fp8 is a matter of single matrix products inside bf16."""
    return torch.float32 if training.precision == "fp32" else torch.bfloat16


def reduce_dtype(training: TrainingConfig) -> torch.dtype:
    """Of gradients while they are accumulated and reduced."""
    return torch.float32 if training.reduce_dtype == "fp32" else torch.bfloat16


def freeze_in(model: Transformer, dtype: torch.dtype) -> None:
    """Make the frozen (meta) parameters of ``model`` ones of ``dtype``: no small updates are to be kept in them."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def apply_precision(model: Transformer, training: TrainingConfig, device: torch.device) -> None:
    """With ``precision: fp8`` let torchao do the matrix products of the blocks, in place; else nothing.

    Before the other axes act: it replaces the projections, and hooks on them would be lost. Raises RuntimeError where
    the device or torchao is missing.
    """
    if training.precision != "fp8":
        return
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < FLOAT8_CAPABILITY:
        raise RuntimeError(
            f"training.precision=fp8 needs a CUDA device of compute capability 8.9 or higher, {device} has "
            f"{'.'.join(map(str, capability)) if device.type == 'cuda' else 'none'}; use bf16"
        )
    convert_to_float8(model)


def convert_to_float8(model: Transformer, *, emulate: bool = False) -> None:
    """Replace the projections of all blocks by torchao's: dynamic scaling, one scale per tensor.

    Master weights, norms, embedding and head are left alone. ``emulate``: compute with the rounding of fp8 on any
    device, slowly. Raises RuntimeError without torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RuntimeError(
            "training.precision=fp8 needs torchao: pip install 'elastic-train[fp8]', or use bf16"
        ) from error
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, name: name.startswith("model.layers."),
    )
