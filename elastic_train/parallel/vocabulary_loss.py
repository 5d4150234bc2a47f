"""Cross entropy of logits whose vocabulary is cut over tensor ranks, without gathering them (arXiv:1909.08053, sec. 3).

Shape suffixes: B batch, T tokens, v this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from elastic_train.data.samples import PADDING_LABEL


def summed_cross_entropy(logits_BTv: Tensor, labels_BT: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over the valid tokens, float32 scalar, the same on every rank of ``group``.

    ``start``: token id of this rank's first column; v may differ between ranks, and be 0. Two small all-reduces (the
    maximum; then sums and target logits together), [B, T] and [2, B, T] float32; none in the backward pass. Keeps one
    float32 tensor [B, T, v]: the probabilities.
    """
    out: Tensor = _SummedCrossEntropy.apply(logits_BTv, labels_BT, start, group)  # type: ignore[no-untyped-call]
    return out


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BTv: Tensor, labels_BT: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        width = logits_BTv.shape[2]
        rows_BT = labels_BT - start
        here_BT = (rows_BT >= 0) & (rows_BT < width)
        rows_BT1 = rows_BT.masked_fill(~here_BT, 0)[..., None]
        top_BT = _largest(logits_BTv)
        dist.all_reduce(top_BT, op=dist.ReduceOp.MAX, group=group)
        shifted_BTv = torch.sub(logits_BTv, top_BT[..., None])
        sums_2BT = top_BT.new_zeros(2, *labels_BT.shape)
        if width:
            sums_2BT[1] = shifted_BTv.gather(2, rows_BT1)[..., 0].masked_fill(~here_BT, 0.0)
        probabilities_BTv = shifted_BTv.exp_()
        sums_2BT[0] = probabilities_BTv.sum(dim=2)
        dist.all_reduce(sums_2BT, group=group)
        probabilities_BTv.div_(sums_2BT[0][..., None])
        valid_BT = labels_BT != PADDING_LABEL
        ctx.save_for_backward(probabilities_BTv, rows_BT1, here_BT, valid_BT)
        ctx.dtype = logits_BTv.dtype
        return (sums_2BT[0].log() - sums_2BT[1]).masked_fill(~valid_BT, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Probability, less 1 at the target; both times the incoming gradient, and 0 for tokens that do not count."""
        probabilities_BTv, rows_BT1, here_BT, valid_BT = ctx.saved_tensors
        scale_BT1 = torch.where(valid_BT, gradient, 0.0)[..., None]
        out_BTv = torch.empty_like(probabilities_BTv, dtype=ctx.dtype)
        torch.mul(probabilities_BTv, scale_BT1, out=out_BTv)
        if probabilities_BTv.shape[2]:
            # The target's entry is computed in float32 and written last: 1 - p would lose its digits in bfloat16.
            target_BT1 = (probabilities_BTv.gather(2, rows_BT1) - here_BT[..., None].float()) * scale_BT1
            out_BTv.scatter_(2, rows_BT1, target_BT1.to(ctx.dtype))
        return out_BTv, None, None, None


def _largest(logits_BTv: Tensor) -> Tensor:
    """Float32 [B, T], -inf where this rank has no column."""
    if logits_BTv.shape[2]:
        return logits_BTv.amax(dim=2).float()
    return torch.full(logits_BTv.shape[:2], -torch.inf, device=logits_BTv.device)
