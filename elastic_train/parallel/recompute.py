"""Recomputation (``training.recompute``): what the forward pass does not keep, the backward pass computes anew.

The same operations run on the same inputs: loss and gradients are bitwise those of a run that keeps everything. Names
of parameters stay as they are, for ``forward`` is replaced and not the module. Hooks are called around ``forward``:
sharding has gathered the weights when it runs again, and progress is not reported twice.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_train.model.transformer import Transformer


def recompute_blocks(model: Transformer) -> None:
    """``full``: of every block only the input is kept."""
    for block in model.blocks.values():
        _recompute(block)


def recompute_attention(model: Transformer) -> None:
    """``selective`` (arXiv:2205.05198, section 5): attention keeps its queries, keys, values and its output only."""
    for block in model.blocks.values():
        _recompute(block.get_submodule("self_attn.core"))


def _recompute(module: nn.Module) -> None:
    # No dropout, hence no random state to bring back.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
