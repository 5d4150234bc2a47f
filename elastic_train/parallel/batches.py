"""The micro-batches of one step, as a rank computes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """M micro-batches of B sequences, padded to the same number on every rank.

    ``input_ids_MBT``, ``labels_MBT``: int64, the tokens that this rank holds. ``documents_MBS``: int64 document numbers
    over the whole sequence, or None where attention does not stop at documents.
    """

    input_ids_MBT: Tensor
    labels_MBT: Tensor
    documents_MBS: Tensor | None

    def __len__(self) -> int:
        return self.input_ids_MBT.shape[0]
