"""What the ranks of the token-exchange tests do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from elastic_train.config.layout import Layout
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.token_exchange import gather_logits, gather_tokens, scatter_sum

Array = npt.NDArray[np.float32]


def exchange(rank: int, operation: str, inputs: list[Array], weights: list[Array]) -> tuple[Array, Array]:
    """Output and input gradient of an operation, for the loss ``sum(output * weights[rank])``."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.from_numpy(inputs[rank]).requires_grad_()
    if operation == "gather_tokens":
        out = gather_tokens(x, group)
    elif operation == "scatter_sum":
        out = scatter_sum(x, group)
    else:
        out = gather_logits(x, sum(part.shape[2] for part in inputs), group)
    (out * torch.from_numpy(weights[rank])).sum().backward()
    assert x.grad is not None
    return out.detach().numpy(), x.grad.numpy()


def mesh_of(rank: int, layout: Layout) -> tuple[list[int], list[int], list[int]]:
    """Members of the pipeline, tensor and data group of this rank."""
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    data = dist.get_process_group_ranks(mesh.batch_group)
    return dist.get_process_group_ranks(mesh.pipeline_group), dist.get_process_group_ranks(mesh.tensor_group), data
