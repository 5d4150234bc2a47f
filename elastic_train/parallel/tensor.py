"""The ``tp`` axis: projections cut by columns or rows, sequence parallelism between them (arXiv:2205.05198).

Between blocks every rank holds only its tokens. Attention and feed-forward gather all tokens, compute with this rank's
heads or columns, and scatter the sum. The head gives every rank the logits of its part of the vocabulary, for all
tokens: the loss takes them as they are (``vocabulary_loss``). Everything is plain tensors and explicit collectives:
DTensor gave the same numbers, but took twice as long in a small step and in the first step after a failure.

Shape suffixes: B batch, T all tokens, D hidden size, V vocabulary; lower case (v) for this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_train.model.lora import DOWN, UP
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import chunk_bounds
from elastic_train.parallel.token_exchange import gather_tokens, scatter_sum

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens")
"""Modules whose weight (and bias) is cut in dim 0: outputs of the projections, rows of the vocabulary."""
ROW = ("o_proj", "down_proj")
"""Modules whose weight is cut in dim 1, their inputs."""


def tensor_dim(name: str) -> int | None:
    """The dim of parameter ``name`` that tensor parallelism cuts; None if every rank holds all of it (norms).

    Of an adapter the matrix is cut that has the cut side of its projection.
    """
    *_, module, _ = parts = name.split(".")
    if module == DOWN:
        return 1 if parts[-3] in ROW else None
    if module == UP:
        return 0 if parts[-3] in COLUMN else None
    return 0 if module in COLUMN else 1 if module in ROW else None


class VocabularyEmbedding(nn.Embedding):
    """Some rows of the embedding, from ``start`` on. Other ids give zeros: the sum over ranks is the lookup."""

    def __init__(self, weight: Tensor, start: int) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight, _freeze=not weight.requires_grad)
        self.start = start

    def forward(self, ids_BT: Tensor) -> Tensor:
        rows_BT = ids_BT - self.start
        foreign_BT = (rows_BT < 0) | (rows_BT >= self.weight.shape[0])
        x_BTD = F.embedding(rows_BT.masked_fill(foreign_BT, 0), self.weight)
        return x_BTD.masked_fill(foreign_BT[..., None], 0.0)


def apply_tensor_parallel(model: Transformer, mesh: ParallelMesh) -> None:
    """Cut the meta parameters of ``model`` and insert the collectives, in place; stages exchange their tokens only."""
    group, size, index = mesh.tensor_group, mesh.layout.tp, mesh.place.tp
    for name, module in list(model.named_modules()):
        dim = tensor_dim(f"{name}.weight") if isinstance(module, nn.Linear | nn.Embedding) else None
        if dim is not None:
            module.weight = _cut(module.weight, dim, size, index)
        if dim == 0 and getattr(module, "bias", None) is not None:
            module.bias = _cut(module.bias, 0, size, index)
    decoder = model.model

    def gather(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_tokens(inputs[0], group), *inputs[1:]

    def scatter(module: nn.Module, inputs: tuple[Tensor], output_BTD: Tensor) -> Tensor:
        return scatter_sum(output_BTD, group)

    if decoder.embed_tokens is not None:
        start, _ = chunk_bounds(model.config.vocab_size, size, index)
        decoder.embed_tokens = VocabularyEmbedding(decoder.embed_tokens.weight, start)
        decoder.embed_tokens.register_forward_hook(scatter)
    for block in model.blocks.values():
        for branch, output in (("self_attn", "self_attn.o_proj"), ("mlp", "mlp.down_proj")):
            block.get_submodule(branch).register_forward_pre_hook(gather)
            block.get_submodule(output).register_forward_hook(scatter)
    if model.lm_head is not None:
        model.lm_head.register_forward_pre_hook(gather)
    model.tie()


def sum_replicated_gradients(gradients: dict[str, Tensor], mesh: ParallelMesh) -> None:
    """Sum, in place, the gradients of parameters that every tensor rank holds: each has its own share only.

    Norms have seen this rank's tokens; matrices of adapters this rank's outputs (A) or inputs (B) of the projection.
    """
    replicated = [gradient for name, gradient in gradients.items() if tensor_dim(name) is None and gradient.numel()]
    if mesh.layout.tp == 1 or not replicated:
        return
    # One collective for all of them; they are small.
    flat = torch.cat([gradient.flatten() for gradient in replicated]).to(mesh.device)  # offloaded ones are elsewhere
    dist.all_reduce(flat, group=mesh.tensor_group)
    parts = torch.split(flat, [gradient.numel() for gradient in replicated])
    torch._foreach_copy_(replicated, [part.view_as(gradient) for part, gradient in zip(parts, replicated, strict=True)])


def _cut(weight: Any, dim: int, size: int, index: int) -> nn.Parameter:
    start, end = chunk_bounds(weight.shape[dim], size, index)
    part = weight.detach().narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=weight.requires_grad)
