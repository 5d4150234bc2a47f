"""A head that is tied to an embedding on another pipeline rank: two copies of one weight, kept equal bit for bit.

Both copies start from the same values and get the same update, because they get the same gradient: the sum of both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.config.model import ModelConfig
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.stages import EMBEDDING


def copies_in_stages(name: str, model: ModelConfig, pp: int) -> int:
    """How many pipeline ranks hold parameter ``name``."""
    return 2 if name == EMBEDDING and model.tie_word_embeddings and pp > 1 else 1


def sum_tied_gradients(gradients: dict[str, Tensor], model: ModelConfig, mesh: ParallelMesh) -> None:
    """Sum, in place, the embedding's gradient, if it has one, over its two copies: on the first and last pipeline rank.

    The shards have been reduced over the data ranks before; both ranks hold the same part. They exchange them, which
    costs what an all-reduce of two costs, and needs no group besides the pipeline's.
    """
    pp, place = mesh.layout.pp, mesh.place.pp
    if copies_in_stages(EMBEDDING, model, pp) == 1 or place not in (0, pp - 1) or EMBEDDING not in gradients:
        return
    gradient = gradients[EMBEDDING]
    if gradient.numel() == 0:
        return
    group = mesh.pipeline_group
    peer, other = pp - 1 - place, torch.empty_like(gradient)
    exchange = [
        dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    # a + b is b + a to the last bit, so both ranks get the same sum.
    gradient.add_(other)
