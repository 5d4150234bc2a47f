from __future__ import annotations

import math

import pytest
import torch

from elastic_train.training.gradients import clip, float32_groups, squared_norm


def test_stages_with_norms_3_and_4_have_norm_5_and_one_scale() -> None:
    stages = [{"a": torch.full((9,), 1.0)}, {"b": torch.tensor([0.0, 4.0])}]
    norm = math.sqrt(sum(squared_norm(stage, {"a": 1, "b": 1}).item() for stage in stages))
    assert norm == pytest.approx(5.0, rel=1e-12)
    for stage in stages:
        clip(stage, norm, 1.0)
    torch.testing.assert_close(stages[0]["a"], torch.full((9,), 0.2))
    torch.testing.assert_close(stages[1]["b"], torch.tensor([0.0, 0.8]))


def test_copies_count_once_and_empty_parts_do_not_count() -> None:
    ranks = [{"norm": torch.tensor([3.0, 4.0]), "matrix": torch.zeros(0, 2)}] * 4
    assert sum(squared_norm(rank, {"norm": 4, "matrix": 1}).item() for rank in ranks) == pytest.approx(25.0)
    assert squared_norm({"matrix": torch.zeros(0, 2)}, {"matrix": 1}).item() == 0.0


@pytest.mark.parametrize("limit", [None, 5.0])
def test_no_clipping_at_or_below_the_limit(limit: float | None) -> None:
    gradients = {"a": torch.tensor([3.0, 4.0])}
    clip(gradients, 5.0, limit)
    assert gradients["a"].tolist() == [3.0, 4.0]


def test_groups_are_blocks_and_cover_everything_in_float32() -> None:
    names = ["model.layers.1.a.weight", "model.layers.1.b.weight", "model.layers.10.a.weight", "model.norm.weight"]
    gradients = {name: torch.full((3,), 1.0 + index, dtype=torch.bfloat16) for index, name in enumerate(names)}
    groups = list(float32_groups(gradients))
    assert [list(group) for group in groups] == [names[:2], names[2:3], names[3:]]
    assert all(value.dtype == torch.float32 for group in groups for value in group.values())
    assert [value[0].item() for group in groups for value in group.values()] == [1.0, 2.0, 3.0, 4.0]


def test_float32_gradients_are_one_group_without_a_copy() -> None:
    gradients = {"model.layers.0.a.weight": torch.ones(3), "model.layers.1.a.weight": torch.ones(3)}
    (group,) = float32_groups(gradients)
    assert all(group[name] is value for name, value in gradients.items())


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    gradient = {"a": torch.ones(1000, dtype=torch.bfloat16)}
    assert squared_norm(gradient, {"a": 1}).item() == pytest.approx(1000.0, rel=1e-6)
