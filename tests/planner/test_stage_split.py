from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from elastic_train.config.model import ModelConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.presets import PRESETS
from elastic_train.planner.stage_split import (
    LayerCosts,
    layer_costs,
    split_layers,
    stage_costs,
    stages_of_rank,
    total_stages,
)


def counts(layers: int, stages: int, costs: LayerCosts) -> list[int]:
    return [len(part) for part in split_layers(layers, stages, costs)]


def compositions(layers: int, stages: int) -> Iterator[list[int]]:
    """All ways to give every stage at least one layer."""
    if stages == 1:
        yield [layers]
        return
    for first in range(1, layers - stages + 2):
        for rest in compositions(layers - first, stages - 1):
            yield [first, *rest]


def test_no_split_is_better() -> None:
    """Against all splits, for random costs: the smallest maximum, and among those the smallest sum of squares."""
    generator = random.Random(0)
    for _ in range(400):
        stages = generator.randint(1, 5)
        layers = generator.randint(stages, 11)
        costs = LayerCosts(generator.randint(1, 20), generator.randint(0, 30), generator.randint(0, 90))
        spent = stage_costs(counts(layers, stages, costs), costs)
        options = [stage_costs(option, costs) for option in compositions(layers, stages)]
        best = min((max(option), sum(cost * cost for cost in option)) for option in options)
        assert (max(spent), sum(cost * cost for cost in spent)) == best


def test_layers_are_contiguous_and_all_there() -> None:
    parts = split_layers(13, 4, LayerCosts(5, 1, 12))
    assert [layer for part in parts for layer in part] == list(range(13))
    assert all(parts)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_without_a_head_the_split_is_even(layers: int, stages: int, expected: list[int]) -> None:
    assert counts(layers, stages, LayerCosts(1, 0, 0)) == expected


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be split over 4 stages"):
        split_layers(3, 4, LayerCosts(1, 0, 0))


def test_llama3_8b() -> None:
    """A vocabulary of 128,256 costs 1.8 blocks at 8,192 tokens: the last of four stages gets 7 layers, not 8."""
    costs = layer_costs(llama3_8b(), 8192)
    assert costs.block == 6 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 12 * 4096 * 8192
    assert costs.head == 6 * 128256 * 4096
    assert costs.head / costs.block == pytest.approx(1.84, abs=0.01)
    split = counts(32, 4, costs)
    assert split == [8, 9, 8, 7]
    assert max(stage_costs(split, costs)) < max(stage_costs([8, 8, 8, 8], costs))


def llama3_8b() -> ModelConfig:
    return ModelConfig.model_validate(PRESETS["llama3-8b"])


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_stage_is_on_one_rank(pipeline: str, pp: int) -> None:
    parallel = ParallelConfig.model_validate({"pipeline": pipeline})
    stages = [stages_of_rank(parallel, pp, rank) for rank in range(pp)]
    assert sorted(stage for rank in stages for stage in rank) == list(range(total_stages(parallel, pp)))
    assert all(rank == sorted(rank) for rank in stages)


def test_placement_of_virtual_stages() -> None:
    looped, v = (ParallelConfig.model_validate({"pipeline": name}) for name in ("interleaved_1f1b", "zbv"))
    assert [stages_of_rank(looped, 3, rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [stages_of_rank(v, 3, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_a_v_has_two_stages_per_rank() -> None:
    with pytest.raises(ValueError, match="virtual_stages=3 must be 2 with pipeline=zbv"):
        ParallelConfig.model_validate({"pipeline": "zbv", "virtual_stages": 3})
