from __future__ import annotations

import math

import pytest
import torch

from elastic_train.training.gradients import clipping, squared_norm


def test_stages_with_norms_3_and_4_have_norm_5_and_one_scale() -> None:  # LOSS-07
    stages = [{"a": torch.full((9,), 1.0)}, {"b": torch.tensor([0.0, 4.0])}]
    norm = math.sqrt(sum(squared_norm(stage, {"a": 1, "b": 1}).item() for stage in stages))
    assert norm == pytest.approx(5.0, rel=1e-12)
    assert clipping(norm, 1.0) == pytest.approx(0.2, rel=1e-12)


def test_copies_count_once_and_empty_parts_do_not_count() -> None:
    ranks = [{"norm": torch.tensor([3.0, 4.0]), "matrix": torch.zeros(0, 2)}] * 4
    assert sum(squared_norm(rank, {"norm": 4, "matrix": 1}).item() for rank in ranks) == pytest.approx(25.0)
    assert squared_norm({"matrix": torch.zeros(0, 2)}, {"matrix": 1}).item() == 0.0


@pytest.mark.parametrize("limit", [None, 5.0])
def test_no_clipping_at_or_below_the_limit(limit: float | None) -> None:
    assert clipping(5.0, limit) == 1.0


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    gradient = {"a": torch.ones(1000, dtype=torch.bfloat16)}
    assert squared_norm(gradient, {"a": 1}).item() == pytest.approx(1000.0, rel=1e-6)
