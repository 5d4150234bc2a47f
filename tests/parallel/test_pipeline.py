from __future__ import annotations

import pytest

from elastic_train.parallel.pipeline import stage_layers


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_layers_are_split_evenly_and_in_order(layers: int, stages: int, expected: list[int]) -> None:
    split = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [len(part) for part in split] == expected
    assert [layer for part in split for layer in part] == list(range(layers))
