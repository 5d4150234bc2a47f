"""The ``cp`` axis: every rank holds some tokens of each sequence, and attention brings together what it needs.

``gather`` (Llama 3, arXiv:2407.21783, section 3.3.2): a sequence is cut into 2 x cp chunks, and rank r holds chunks r
and 2 x cp - 1 - r, so that causal attention is the same work for all. Keys and values are gathered, queries stay.
``ulysses`` (arXiv:2309.14509): rank r holds one contiguous chunk; around attention, heads are exchanged for tokens, so
that every rank attends over the whole sequence with some of the heads.

Shape suffixes: B batch, H heads, S tokens of the sequence, T tokens held here, E width of a head; lower case (h) for
this rank's part of the heads.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elastic_train.config.job import Job
from elastic_train.model.attention import Context, attend
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.collectives import all_gather_single, reduce_scatter_single
from elastic_train.parallel.mesh import ParallelMesh


def apply_context_parallel(model: Transformer, job: Job, mesh: ParallelMesh) -> None:
    """Tell ``model`` which tokens it holds, and give every block the attention of ``parallel.context``, in place."""
    chunks = held_chunks(job.parallel.context, job.data.sequence_length, mesh.layout.cp, mesh.place.cp)
    model.indices_T = torch.cat([torch.arange(chunk.start, chunk.stop, device=mesh.device) for chunk in chunks])
    for block in model.blocks.values():
        core: nn.Module
        if job.parallel.context == "gather":
            core = GatheredCore(mesh.context_group, [chunk.start for chunk in chunks])
        else:
            core = UlyssesCore(mesh.context_group)
        block.get_submodule("self_attn").core = core


def held_chunks(kind: Literal["gather", "ulysses"], length: int, ranks: int, rank: int) -> list[range]:
    """The places in a sequence of ``length`` tokens that ``rank`` holds, chunk by chunk; the chunks are equal."""
    numbers, count = ([rank, 2 * ranks - 1 - rank], 2 * ranks) if kind == "gather" else ([rank], ranks)
    size = length // count
    return [range(number * size, (number + 1) * size) for number in numbers]


class GatheredCore(nn.Module):
    """Attention of two chunks of queries over the gathered keys and values, each over those before its end only."""

    def __init__(self, group: dist.ProcessGroup, starts: list[int]) -> None:
        super().__init__()
        self.group = group
        self.starts = starts

    def forward(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, context: Context) -> Tensor:
        k_BHSE, v_BHSE = gather_sequence(torch.stack((k_BHTE, v_BHTE)), self.group).unbind()
        parts = [
            attend(q_BHCE, k_BHSE, v_BHSE, context, start=start).transpose(1, 2)
            for q_BHCE, start in zip(q_BHTE.chunk(2, dim=2), self.starts, strict=True)
        ]
        # Joined token by token: the output projection then takes the result as it lies in memory.
        return torch.cat(parts, dim=1).transpose(1, 2)


class UlyssesCore(nn.Module):
    """Attention over the whole sequence with this rank's part of the heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, context: Context) -> Tensor:
        ranks = dist.get_world_size(self.group)
        # One exchange for all three: each rank's heads of q, k and v lie together.
        parts = [torch.unflatten(x_BHTE, 1, (ranks, -1)) for x_BHTE in (q_BHTE, k_BHTE, v_BHTE)]
        heads = [part.shape[2] for part in parts]
        qkv_BhSE = heads_for_tokens(torch.cat(parts, dim=2).flatten(1, 2), self.group)
        q_BhSE, k_BhSE, v_BhSE = torch.split(qkv_BhSE, heads, dim=1)
        return tokens_for_heads(attend(q_BhSE, k_BhSE, v_BhSE, context, start=0), self.group)


def gather_sequence(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Both chunks of all ranks in the order of the sequence, [.., S, E]. Gradient: summed over the ranks, cut as ``x``.

    ``x``: [.., T, E] with the chunks of ``gather`` one after the other.
    """
    out: Tensor = _GatherSequence.apply(x_BHTE, group)  # type: ignore[no-untyped-call]
    return out


def heads_for_tokens(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of this rank's heads, x_BhSE. Gradient: the exchange back."""
    out: Tensor = _HeadsForTokens.apply(x_BHTE, group)  # type: ignore[no-untyped-call]
    return out


def tokens_for_heads(x_BhSE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's tokens, x_BHTE. Gradient: the exchange back."""
    out: Tensor = _TokensForHeads.apply(x_BhSE, group)  # type: ignore[no-untyped-call]
    return out


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ranks = dist.get_world_size(group)
        gathered = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        all_gather_single(gathered, x.contiguous(), group=group)
        # [rank, .., 2, chunk, E]: the first chunks of all ranks, then the second ones from the last rank to the first.
        first, second = torch.unflatten(gathered.view(ranks, *x.shape), -2, (2, -1)).unbind(-3)
        return torch.cat((first, second.flip(0))).movedim(0, -3).flatten(-3, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        first, second = torch.unflatten(gradient, -2, (2 * ranks, -1)).movedim(-3, 0).chunk(2)
        parts = torch.stack((first, second.flip(0)), dim=-3).flatten(-3, -2)
        out = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(out, parts.flatten(0, 1), group=ctx.group)
        return out, None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``parts[i]`` goes to rank i; returns what each rank sent here, in rank order."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = torch.unflatten(x_BHTE, 1, (dist.get_world_size(group), -1)).movedim(1, 0)
    return _exchange(parts, group).movedim(0, 2).flatten(2, 3)


def _to_tokens(x_BhSE: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = torch.unflatten(x_BhSE, 2, (dist.get_world_size(group), -1)).movedim(2, 0)
    # Laid out token by token, as the projections read and write it.
    return _exchange(parts, group).permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHTE: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x_BHTE, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BhSE: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(gradient_BhSE, ctx.group), None


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BhSE: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x_BhSE, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTE: Tensor) -> tuple[Tensor, None]:
        return _to_heads(gradient_BHTE, ctx.group), None
