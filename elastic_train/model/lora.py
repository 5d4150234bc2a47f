"""Low-rank adapters (arXiv:2106.09685): a small product beside a projection whose own weight is not trained.

Names of parameters are PEFT's: ``q_proj.lora_A.weight`` beside ``q_proj.weight``.

Shape suffixes: B batch, T tokens, D inputs, F outputs.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from elastic_train.config.lora import LoraConfig
from elastic_train.model.attention import Projection
from elastic_train.model.transformer import Transformer

DOWN, UP = "lora_A", "lora_B"
"""Modules of an adapter: from the inputs of its projection to ``rank`` numbers, and from these to its outputs."""


class LoraProjection(Projection):
    """``W x + bias + scale x B A x``; only A and B are trained."""

    def __init__(self, base: Projection, config: LoraConfig) -> None:
        """``base``: of the same shape; its (meta) parameters are not taken over."""
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.requires_grad_(False)
        self.lora_A = Projection(base.in_features, config.rank)
        self.lora_B = Projection(config.rank, base.out_features)
        self.scale = config.scale

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Scaled where it is narrow.
        out_BTF: Tensor = super().forward(x_BTD) + self.lora_B(self.scale * self.lora_A(x_BTD))
        return out_BTF


def apply_lora(model: Transformer, config: LoraConfig | None) -> None:
    """Give the targets of ``config`` adapters and freeze all else, in place; nothing without ``config``.

    Before any parallel axis acts: it replaces the projections.
    """
    if config is None:
        return
    model.requires_grad_(False)
    for block in model.blocks.values():
        for name, module in list(block.named_modules()):
            parent, _, attribute = name.rpartition(".")
            if attribute in config.targets:
                setattr(block.get_submodule(parent), attribute, LoraProjection(cast(Projection, module), config))


def is_adapter(name: str) -> bool:
    """Whether parameter ``name`` is of an adapter: no model of Hugging Face has it."""
    return name.split(".")[-2] in (DOWN, UP)
