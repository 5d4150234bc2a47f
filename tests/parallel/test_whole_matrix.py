from __future__ import annotations

import pytest
import torch

from elastic_train.config.layout import Layout
from tests.parallel.matrix_ranks import exchange, whole
from tests.ranks import run_ranks

SHAPES = {
    "a.q_proj.weight": (6, 5),  # cut in dim 0 by tensor parallelism
    "b.o_proj.weight": (5, 6),  # in dim 1
    "c.down_proj.weight": (3, 4),  # three rows over four ranks: the last one holds nothing
    "d.q_proj.weight": (2, 8),
    "e.up_proj.weight": (7, 9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layout", "sharded"),
    [
        (Layout(), True),
        (Layout(dp_shard=4), True),
        (Layout(dp_replicate=3), False),
        (Layout(dp_replicate=2, dp_shard=2), True),
        (Layout(dp_shard=2, tp=2), True),
        (Layout(dp_replicate=2, tp=2), False),
        (Layout(pp=2, dp_shard=2, cp=2), True),
        (Layout(dp_shard=7), True),
    ],
    ids=str,
)
def test_every_matrix_is_computed_once_in_a_stage_and_comes_back_in_parts(
    layout: Layout, sharded: bool, dtype: torch.dtype
) -> None:
    results = run_ranks(exchange, layout.world_size, SHAPES, layout, sharded, dtype)
    assert [wrong for wrong, _ in results] == [[]] * layout.world_size
    stage = layout.world_size // layout.pp
    for start in range(0, layout.world_size, stage):
        computed = sorted(matrix for _, seen in results[start : start + stage] for matrix in seen)
        assert computed == sorted(value.flatten().tolist() for value in whole(SHAPES).values())
        loads = [len(seen) for _, seen in results[start : start + stage]]
        assert max(loads) - min(loads) <= 1
