"""What the ranks of the tests of collectives do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import chunk_bounds
from elastic_train.parallel.stages import EMBEDDING
from elastic_train.parallel.tied import sum_tied_gradients
from elastic_train.parallel.token_exchange import gather_tokens, scatter_sum
from elastic_train.parallel.vocabulary_loss import summed_cross_entropy

Array = npt.NDArray[np.float32]


def exchange(rank: int, operation: str, inputs: list[Array], weights: list[Array]) -> tuple[Array, Array]:
    """Output and input gradient of an operation, for the loss ``sum(output * weights[rank])``."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.from_numpy(inputs[rank]).requires_grad_()
    out = gather_tokens(x, group) if operation == "gather_tokens" else scatter_sum(x, group)
    (out * torch.from_numpy(weights[rank])).sum().backward()
    assert x.grad is not None
    return out.detach().numpy(), x.grad.numpy()


def vocabulary_loss(
    rank: int, logits_BTV: Array, labels_BT: npt.NDArray[np.int64], dtype: torch.dtype, scale: float
) -> tuple[float, Array, torch.dtype, list[tuple[torch.dtype, tuple[int, ...]]]]:
    """Loss, gradient of this rank's columns for ``scale * loss``, its dtype, and floating tensors kept for backward."""
    group = dist.group.WORLD
    assert group is not None
    start, end = chunk_bounds(logits_BTV.shape[2], dist.get_world_size(), rank)
    part = torch.from_numpy(logits_BTV[..., start:end].copy()).to(dtype).requires_grad_()
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.dim() == 3:
            kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = summed_cross_entropy(part, torch.from_numpy(labels_BT), start, group)
    (scale * loss).backward()
    assert part.grad is not None
    return loss.item(), part.grad.float().numpy(), part.grad.dtype, kept


def tied_sum(rank: int, layout: Layout, tied: bool, numel: int) -> tuple[Array, Array]:
    """An embedding's and another gradient after the sum over copies; both begin as ``rank + 1``."""
    model = ModelConfig.model_validate(
        {
            "hidden_size": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 8,
            "vocab_size": 8,
            "tie_word_embeddings": tied,
        }
    )
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    gradients = {name: torch.full((numel,), rank + 1.0) for name in (EMBEDDING, "model.norm.weight")}
    sum_tied_gradients(gradients, model, mesh)
    return gradients[EMBEDDING].numpy(), gradients["model.norm.weight"].numpy()


def mesh_of(rank: int, layout: Layout) -> tuple[list[int], list[int], list[int]]:
    """Members of the pipeline, tensor and data group of this rank."""
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    data = dist.get_process_group_ranks(mesh.batch_group)
    return dist.get_process_group_ranks(mesh.pipeline_group), dist.get_process_group_ranks(mesh.tensor_group), data
