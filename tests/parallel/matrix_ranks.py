"""What the ranks of the whole-matrix tests do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from elastic_train.config.layout import Layout
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.parallel.shard import cuts_of, local_box
from elastic_train.parallel.tensor import tensor_dim
from elastic_train.parallel.whole_matrix import WholeMatrices

Shapes = dict[str, tuple[int, ...]]


def whole(shapes: Shapes) -> dict[str, Tensor]:
    """Values that are all different, small integers, exact in bfloat16 up to 256 of them."""
    return {
        name: torch.arange(float(np.prod(shape))).view(shape) + index
        for index, (name, shape) in enumerate(shapes.items())
    }


def part(name: str, matrix: Tensor, mesh: ParallelMesh, sharded: bool) -> Tensor:
    box = local_box(tuple(matrix.shape), cuts_of(tensor_dim(name), mesh.layout, mesh.place, sharded=sharded))
    return matrix[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].clone()


def exchange(
    rank: int, shapes: Shapes, layout: Layout, sharded: bool, dtype: torch.dtype
) -> tuple[list[str], list[list[float]]]:
    """Names that came back wrong, and the matrices that this rank has computed, as flat lists."""
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    matrices = WholeMatrices(shapes, mesh, dtype=dtype, sharded=sharded)
    values, seen = whole(shapes), []

    def negate(matrix: Tensor) -> Tensor:
        seen.append(matrix.flatten().tolist())
        return -matrix

    parts = {name: part(name, value, mesh, sharded) for name, value in values.items()}
    results = dict(matrices.map(parts.__getitem__, negate))
    assert results.keys() == shapes.keys()
    wrong = [
        name
        for name, result in results.items()
        if result.dtype != dtype or not torch.equal(result.float(), -part(name, values[name], mesh, sharded))
    ]
    return wrong, seen
