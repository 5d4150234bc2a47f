from __future__ import annotations

import numpy as np
import pytest
import torch

from elastic_train.config.layout import Layout
from elastic_train.parallel.shard import Box, chunk_bounds, cuts_of, local_box, replicas

LAYOUTS = [
    Layout(),
    Layout(tp=3),
    Layout(dp_shard=4),
    Layout(dp_shard=5, tp=3),
    Layout(dp_replicate=2, dp_shard=7),
    Layout(pp=2, dp_replicate=2, dp_shard=2, tp=3),
    Layout(dp_replicate=2, dp_shard=3, cp=2),
]


def box_of(shape: tuple[int, ...], dim: int | None, layout: Layout, rank: int) -> Box:
    return local_box(shape, cuts_of(dim, layout, layout.coordinates(rank), sharded=True))


@pytest.mark.parametrize("size", [0, 1, 6, 90, 250, 256, 1003])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_chunks_are_torch_chunks(size: int, parts: int) -> None:
    expected = [list(chunk) for chunk in torch.arange(size).chunk(parts) if len(chunk)]
    actual = [list(range(*chunk_bounds(size, parts, index))) for index in range(parts)]
    assert [chunk for chunk in actual if chunk] == expected
    assert all(not chunk for chunk in actual[len(expected) :])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((1003, 90), 0), ((90, 111), 1), ((90,), None), ((6, 5), 0), ((2, 3), 1), ((1,), None)]
)
def test_boxes_cover_every_element_equally_often(layout: Layout, shape: tuple[int, ...], dim: int | None) -> None:
    count = np.zeros(shape, dtype=int)
    for rank in range(layout.world_size):
        if layout.coordinates(rank).pp == 0:
            box = box_of(shape, dim, layout, rank)
            count[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (count == replicas(cuts_of(dim, layout, layout.coordinates(0), sharded=True), layout)).all()


def test_tensor_parallelism_cuts_before_fsdp() -> None:
    layout = Layout(dp_shard=2, tp=3)
    # 10 rows over tp=3: 4, 4, 2; the middle four over dp_shard=2: rows 4-5 and 6-7.
    boxes = [box_of((10, 7), 0, layout, rank) for rank in range(6)]
    assert [(box.offsets[0], box.sizes[0]) for box in boxes] == [(0, 2), (4, 2), (8, 1), (2, 2), (6, 2), (9, 1)]
    # Columns over tp=3: 3, 3, 1; rows over dp_shard=2: 5 each.
    box = box_of((10, 7), 1, layout, 5)
    assert (box.offsets, box.sizes) == ((5, 6), (5, 1))


def test_six_elements_over_four_ranks_leave_the_last_one_empty() -> None:
    layout = Layout(dp_shard=4)
    boxes = [box_of((6,), None, layout, rank) for rank in range(4)]
    assert [(box.offsets[0], box.sizes[0]) for box in boxes] == [(0, 2), (2, 2), (4, 2), (6, 0)]
