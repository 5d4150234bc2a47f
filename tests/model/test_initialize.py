from __future__ import annotations

import itertools

import pytest
import torch

from elastic_train.model.initialize import BLOCK_ELEMENTS, fill_initial

NAME = "model.layers.0.mlp.up_proj.weight"


def filled(shape: tuple[int, int], offsets: tuple[int, int], sizes: tuple[int, int], seed: int = 1) -> torch.Tensor:
    tensor = torch.full(sizes, float("nan"))
    fill_initial(tensor, NAME, shape, offsets, seed, 0.02)
    return tensor


@pytest.mark.parametrize("shape", [(1003, 90), (7, 3), (5, 2 * BLOCK_ELEMENTS), (1, 1)])
def test_every_part_equals_the_same_part_of_the_whole(shape: tuple[int, int]) -> None:
    whole = filled(shape, (0, 0), shape)
    assert not whole.isnan().any()
    row_cuts = sorted({0, 1, shape[0] // 3, shape[0] // 2, shape[0]})
    column_cuts = sorted({0, shape[1] // 3, shape[1]})
    for (top, bottom), (left, right) in itertools.product(
        itertools.pairwise(row_cuts), itertools.pairwise(column_cuts)
    ):
        part = filled(shape, (top, left), (bottom - top, right - left))
        assert torch.equal(part, whole[top:bottom, left:right])


def test_moments_of_the_distribution() -> None:
    values = filled((2000, 300), (0, 0), (2000, 300))
    assert abs(values.mean()) < 1e-4  # 4 standard errors
    assert values.std().item() == pytest.approx(0.02, rel=0.004)
    # Blocks are not copies of each other.
    rows = BLOCK_ELEMENTS // 300
    assert abs(torch.corrcoef(torch.stack((values[:rows].flatten(), values[rows : 2 * rows].flatten())))[0, 1]) < 0.03


def test_seed_and_name_matter() -> None:
    base = filled((8, 8), (0, 0), (8, 8))
    assert torch.equal(base, filled((8, 8), (0, 0), (8, 8)))
    assert not torch.equal(base, filled((8, 8), (0, 0), (8, 8), seed=2))
    other = torch.empty(8, 8)
    fill_initial(other, NAME.replace("up", "gate"), (8, 8), (0, 0), 1, 0.02)
    assert not torch.equal(base, other)


def test_norm_weights_are_one_and_empty_parts_are_accepted() -> None:
    norm = torch.empty(5)
    fill_initial(norm, "model.norm.weight", (10,), (5,), 1, 0.02)
    assert torch.equal(norm, torch.ones(5))
    fill_initial(torch.empty(0, 4), NAME, (6, 4), (6, 0), 1, 0.02)
