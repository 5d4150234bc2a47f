from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_train.parallel.exact import BITS, FixedPointSum, from_fixed_point

UNIT = 2.0**-BITS


def summed(gradients: list[Tensor], parts: int = 1) -> Tensor:
    """The integers of a sum over several gradients of one shape, as columns [parts, width]."""
    rows = -(-gradients[0].shape[0] // parts)
    columns = torch.zeros(parts, rows * gradients[0][0].numel(), dtype=torch.int64)
    total = FixedPointSum(columns, tuple(gradients[0].shape))
    total.uses = 1
    total.start_step(len(gradients))
    for gradient in gradients:
        total.add(gradient)
    assert total.missing == 0
    return columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_rounded_integers_in_any_order(dtype: torch.dtype) -> None:
    """Sizes from 1e-15, below the resolution, to 100; Python's fractions round to even as well."""
    random = np.random.default_rng(0)
    values = random.standard_normal((7, 1003)) * 10.0 ** random.uniform(-15, 1.4, (7, 1003))
    gradients = [torch.from_numpy(row).to(dtype) for row in values]
    expected = [sum(round(Fraction(g[i].item()) * 2**BITS) for g in gradients) for i in range(1003)]
    for order in (range(7), range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4)):
        assert summed([gradients[index] for index in order])[0].tolist() == expected
    forwards, backwards = sum(gradients[1:], gradients[0]), sum(gradients[-2::-1], gradients[-1])
    assert not torch.equal(forwards, backwards), "sums of floats do depend on the order"


def test_halves_are_rounded_to_even_whatever_the_sum_is_so_far() -> None:
    """0.5, 1.5 and 2.5 units become 0, 2 and 2; adding floats would round 1 + 0.5 to 2 and 0 + 0.5 to 0."""
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]) * UNIT
    odd = torch.full((5,), UNIT)
    for gradients in ([halves, odd], [odd, halves]):
        assert summed(gradients)[0].tolist() == [1, 3, 3, 1, -1]


def test_rows_are_cut_among_shards_as_torch_chunks_them() -> None:
    """Seven rows over three shards: three, three and one."""
    gradient = torch.arange(1.0, 15.0).view(7, 2)
    columns = summed([gradient, gradient], parts=3)
    for index, chunk in enumerate(torch.chunk(2 * gradient, 3)):
        mine = from_fixed_point({"q_proj.weight": columns[index, : chunk.numel()]})["q_proj.weight"]
        assert mine.dtype == torch.float32 and mine.tolist() == chunk.flatten().tolist()


def test_large_sums_fit() -> None:
    """4,000 gradients of 127 are 508,000: the largest sum of 64 bits is 2**19 = 524,288."""
    columns = summed([torch.tensor([127.0, -127.0])] * 4000)
    assert from_fixed_point({"norm.weight": columns[0]})["norm.weight"].tolist() == [508_000.0, -508_000.0]


def test_parameters_larger_than_a_piece() -> None:
    gradient = torch.linspace(-1, 1, 3 * 2**16 + 5).float()
    assert torch.equal(from_fixed_point({"norm.weight": summed([gradient])[0]})["norm.weight"], gradient)
