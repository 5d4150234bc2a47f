"""Cross entropy over the valid tokens of the whole step.

Shape suffixes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from elastic_train.data.batches import PADDING_LABEL


class TokenLoss:
    """Sum over this micro-batch's valid tokens divided by the valid tokens of the global batch.

    Losses (and gradients) of all micro-batches therefore add up to those of the step, however they are distributed.
    """

    def __init__(self) -> None:
        self.valid_tokens = 1
        """Valid tokens of the global batch, to be set before each step."""

    def __call__(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        """Scalar float32. A micro-batch without valid tokens gives exactly 0, with zero gradients."""
        total = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=PADDING_LABEL, reduction="sum"
        )
        return total / max(1, self.valid_tokens)
