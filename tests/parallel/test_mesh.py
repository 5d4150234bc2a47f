from __future__ import annotations

import pytest

from elastic_train.config.layout import Layout
from tests.parallel.exchanges import mesh_of
from tests.ranks import RankError, run_ranks


def test_groups_are_slices_of_the_grid() -> None:
    results = run_ranks(mesh_of, 8, Layout(pp=2, dp_replicate=2, dp_shard=1, tp=2))
    assert results[0] == ([0, 4], [0, 1], [0, 2])
    assert results[7] == ([3, 7], [6, 7], [5, 7])


def test_data_group_spans_both_data_axes() -> None:
    assert [data for _, _, data in run_ranks(mesh_of, 4, Layout(dp_replicate=2, dp_shard=2))] == [[0, 1, 2, 3]] * 4
    assert [data for _, _, data in run_ranks(mesh_of, 2, Layout(tp=2))] == [[0], [1]]


def test_world_of_another_size_is_refused() -> None:
    with pytest.raises(RankError, match="layout tp3 needs 3 ranks, the process group has 2"):
        run_ranks(mesh_of, 2, Layout(tp=3))
