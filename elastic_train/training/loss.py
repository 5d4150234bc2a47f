"""Cross entropy over the valid tokens of the whole step.

Shape suffixes: B batch, T tokens, V vocabulary; v for this rank's part of it under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from elastic_train.config.model import ModelConfig
from elastic_train.data.samples import PADDING_LABEL
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import chunk_bounds
from elastic_train.parallel.vocabulary_loss import summed_cross_entropy


class TokenLoss:
    """Sum over this micro-batch's valid tokens divided by the valid tokens of the global batch.

    Losses (and gradients) of all micro-batches therefore add up to those of the step, however they are distributed.
    """

    def __init__(self, summed: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        """``summed``: float32 sum of the token losses of logits and labels; None: from logits of all the vocabulary."""
        self._summed = summed or _cross_entropy
        self.valid_tokens = 1
        """Valid tokens of the global batch, to be set before each step."""

    def __call__(self, logits_BTv: Tensor, labels_BT: Tensor) -> Tensor:
        """Scalar float32. A micro-batch without valid tokens gives exactly 0, with zero gradients."""
        return self._summed(logits_BTv, labels_BT) / max(1, self.valid_tokens)


def build_loss(model: ModelConfig, mesh: ParallelMesh) -> TokenLoss:
    """The loss of this rank's logits. Under tensor parallelism, which cuts the vocabulary, every rank gets the same."""
    if mesh.layout.tp == 1:
        return TokenLoss()
    start, _ = chunk_bounds(model.vocab_size, mesh.layout.tp, mesh.place.tp)
    return TokenLoss(partial(summed_cross_entropy, start=start, group=mesh.tensor_group))


def _cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=PADDING_LABEL, reduction="sum"
    )
