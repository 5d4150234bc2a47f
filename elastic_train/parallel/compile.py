"""``training.compile``: every block's computation goes through ``torch.compile``."""
from __future__ import annotations

import torch

from elastic_train.model.transformer import Transformer


def apply_compile(model: Transformer, device: torch.device) -> None:
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)
