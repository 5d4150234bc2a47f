"""What the ranks of the tests of context parallelism do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.nn import functional as F

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model.attention import Context
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.context import apply_context_parallel
from elastic_train.parallel.mesh import ParallelMesh

Array = npt.NDArray[np.float64]


def attention(
    rank: int, job: Job, arrays: dict[str, Array], documents: npt.NDArray[np.int64] | None
) -> tuple[list[int], dict[str, Array]]:
    """Places of this rank's tokens; its output and gradients of q, k, v for the loss ``sum(output * weight)``."""
    world, length = dist.get_world_size(), job.data.sequence_length
    model = Transformer(job.model, layers=range(1), first=False, last=False)
    apply_context_parallel(model, job, ParallelMesh(Layout(cp=world), rank, torch.device("cpu")))
    assert model.indices_T is not None
    held = {name: torch.from_numpy(array)[:, :, model.indices_T].clone() for name, array in arrays.items()}
    inputs = [held[name].requires_grad_() for name in ("q", "k", "v")]
    documents_BS = None if documents is None else torch.from_numpy(documents)
    context = Context(model.rotary, length, torch.device("cpu"), documents_BS, model.indices_T)
    out = model.blocks[0].get_submodule("self_attn.core")(*inputs, context)
    (out * held["weight"]).sum().backward()
    gradients = {name: x.grad.numpy() for name, x in zip("qkv", inputs, strict=True) if x.grad is not None}
    return model.indices_T.tolist(), {"out": out.detach().numpy()} | gradients


def token_losses(rank: int, job: Job, ids: list[int], documents: list[int]) -> tuple[list[int], list[float]]:
    """Places of this rank's tokens, and the loss of each, with weights that are the same on every rank."""
    model = Transformer(job.model).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    model.sequence_length = len(documents)
    if dist.get_world_size() > 1:
        apply_context_parallel(model, job, ParallelMesh(Layout(cp=dist.get_world_size()), rank, torch.device("cpu")))
    places = torch.arange(len(documents)) if model.indices_T is None else model.indices_T
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits_BTV = model(tokens[:, places], torch.tensor([documents]))
    losses = F.cross_entropy(logits_BTV[0], tokens[0, places + 1], reduction="none")
    return places.tolist(), losses.tolist()
