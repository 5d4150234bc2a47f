"""Recomputation (``training.recompute``): what the forward pass does not keep, the backward pass computes anew.

``full`` keeps the input of every block; ``selective`` (arXiv:2205.05198, section 5) keeps all but what attention holds
between its queries, keys, values and its output. The same operations run on the same inputs, so loss and gradients are
bitwise those of ``none``.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch.utils.checkpoint import checkpoint

from elastic_train.model.transformer import Transformer


def apply_recompute(model: Transformer, mode: Literal["none", "selective", "full"]) -> None:
    """Replace ``forward`` of the blocks, or of their attention cores: names of parameters stay as they are.

    Hooks are called around ``forward``: sharding has gathered the weights when it runs again, and beats are not doubled.
    """
    if mode == "none":
        return
    for block in model.blocks.values():
        part = block if mode == "full" else block.get_submodule("self_attn.core")
        # No dropout, hence no random state to bring back.
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False)
