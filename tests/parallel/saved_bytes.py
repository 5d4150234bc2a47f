"""Measures what a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model import attention
from elastic_train.model.attention import Context
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.context import apply_context_parallel
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.recompute import recompute_attention, recompute_blocks
from elastic_train.parallel.tensor import apply_tensor_parallel

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "repeated": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def saved_bytes(forward: Callable[[], Tensor], shared: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that ``forward`` saves, without those of ``shared``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    out.float().sum().backward()
    return total


def block_saves(job: Job, layout: Layout, mesh: ParallelMesh | None, kernel: str, dtype: torch.dtype) -> int:
    """Bytes that the block of ``job``, cut along tp and cp of ``layout``, saves for one micro-batch."""
    model = Transformer(job.model, layers=range(1), first=False, last=False)
    if mesh is not None and layout.tp > 1:
        apply_tensor_parallel(model, mesh)
    if mesh is not None and layout.cp > 1:
        apply_context_parallel(model, job, mesh)
    if job.training.recompute == "selective":
        recompute_attention(model)
    if job.training.recompute == "full":
        recompute_blocks(model)
    model = model.to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    batch, length = job.training.micro_batch, job.data.sequence_length
    documents_BS = (torch.arange(length) // 10).expand(batch, -1) if job.data.document_mask else None
    context = Context(model.rotary, length, torch.device("cpu"), documents_BS, model.indices_T)
    x_BTD = torch.randn(batch, length // layout.cp // layout.tp, job.model.hidden_size, dtype=dtype, requires_grad=True)
    block = model.blocks[0]
    groups = () if kernel == "repeated" else ("cpu",)
    with sdpa_kernel(KERNELS[kernel]), mock.patch.object(attention, "_GROUPS_UNDER_MASKS", groups):
        block(x_BTD, context)  # makes the masks
        shared = [*model.parameters(), *context._cos_sin, *context._masks.values()]
        return saved_bytes(lambda: block(x_BTD, context), shared)


def rank_saves(rank: int, jobs: list[Job], layout: Layout, kernels: list[str], dtypes: list[str]) -> list[int]:
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    cases = zip(jobs, kernels, dtypes, strict=True)
    return [block_saves(job, layout, mesh, kernel, getattr(torch, dtype)) for job, kernel, dtype in cases]
