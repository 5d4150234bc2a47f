from __future__ import annotations

import numpy as np
import pytest

from elastic_train.config.layout import Layout
from tests.parallel.exchanges import tied_sum
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(pp=2), [3, 3]),
        (Layout(pp=3), [4, 2, 4]),  # the middle rank holds no copy
        (Layout(pp=2, tp=2), [4, 6, 4, 6]),  # ranks 0 and 2, 1 and 3 hold the same rows
        (Layout(pp=2, dp_shard=2), [4, 6, 4, 6]),
        (Layout(dp_shard=2), [1, 2]),
    ],
    ids=str,
)
def test_first_and_last_rank_sum_the_embedding_only(layout: Layout, expected: list[int]) -> None:
    results = run_ranks(tied_sum, layout.world_size, layout, True, 5)
    for rank, (embedding, other) in enumerate(results):
        np.testing.assert_array_equal(embedding, np.full(5, expected[rank]))
        np.testing.assert_array_equal(other, np.full(5, rank + 1))


def test_nothing_is_summed_unless_tied_or_where_a_shard_is_empty() -> None:
    assert [embedding.tolist() for embedding, _ in run_ranks(tied_sum, 2, Layout(pp=2), False, 1)] == [[1], [2]]
    assert [embedding.tolist() for embedding, _ in run_ranks(tied_sum, 2, Layout(pp=2), True, 0)] == [[], []]
