"""Collectives of tensor parallelism with their gradients. Every rank of the group calls them in the same order.

Shape suffixes: B batch, T all tokens, D width; lower case (t) for this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from elastic_train.parallel.collectives import all_gather_single, reduce_scatter_single


def gather_tokens(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x_BTD of all ranks' tokens. Gradient: summed over the ranks, each keeps its tokens."""
    out: Tensor = _GatherTokens.apply(x_BtD, group)  # type: ignore[no-untyped-call]
    return out


def scatter_sum(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over ranks, x_BtD. Gradient: gathered. T is a multiple of the number of ranks."""
    out: Tensor = _ScatterSum.apply(x_BTD, group)  # type: ignore[no-untyped-call]
    return out


def _all_gather_tokens(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    gathered = x_BtD.new_empty(size * x_BtD.shape[0], *x_BtD.shape[1:])
    all_gather_single(gathered, x_BtD.contiguous(), group=group)
    return gathered.view(size, *x_BtD.shape).transpose(0, 1).flatten(1, 2)


def _reduce_scatter_tokens(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    batch, tokens, width = x_BTD.shape
    parts = x_BTD.reshape(batch, size, tokens // size, width).transpose(0, 1).flatten(0, 1)
    out_BtD = x_BTD.new_empty(batch, tokens // size, width)
    reduce_scatter_single(out_BtD, parts, group=group)
    return out_BtD


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather_tokens(x_BtD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_tokens(gradient_BTD, ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_tokens(x_BTD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BtD: Tensor) -> tuple[Tensor, None]:
        return _all_gather_tokens(gradient_BtD, ctx.group), None
