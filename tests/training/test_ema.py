from __future__ import annotations

import numpy as np
import pytest

from elastic_train.config.layout import Layout
from tests.ranks import run_ranks
from tests.training.optimizer_runs import average_by_hand, job_with_optimizer
from tests.training.runs import assemble, run
from tests.training.synthetic import small_job

JOB = small_job(training={"ema_decay": 0.9, "micro_batch": 2})


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=3), Layout(pp=2, tp=2)], ids=str)
def test_equals_an_average_by_hand(layout: Layout) -> None:
    """float64, from the weights after each of five steps."""
    ranks = run_ranks(average_by_hand, layout.world_size, JOB, layout, 5)
    actual, expected = (assemble([rank[index] for rank in ranks]) for index in (0, 1))
    assert len(expected) == 4 * 9 + 3
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-6, atol=1e-7, err_msg=key)
        assert not np.array_equal(actual[key], actual[key.replace("ema.", "param.")])


def test_starts_as_the_initial_weights_and_costs_four_bytes_per_parameter() -> None:
    before = run(JOB, Layout(dp_shard=2), 1).before
    averages = {key: value for key, value in before.items() if key.startswith("ema.")}
    assert sum(value.nbytes for value in averages.values()) == 4 * JOB.model.num_parameters
    for key, value in averages.items():
        np.testing.assert_array_equal(value, before[key.replace("ema.", "param.")])
    assert not any(key.startswith("ema.") for key in run(small_job(), Layout(), 1).before)


def test_is_the_same_on_every_layout_and_after_a_move() -> None:
    """Six steps on one rank; and three on two ranks, continued on a pipeline, from state as a restore writes it."""
    expected = run(JOB, Layout(), 6).after
    half = run(JOB, Layout(dp_shard=2), 3)
    moved = run(JOB, Layout(pp=2), 6, first=4, state=half.after).after
    for key in [key for key in expected if key.startswith("ema.")]:
        np.testing.assert_allclose(moved[key], expected[key], rtol=0, atol=1e-6, err_msg=key)


def test_a_step_that_is_not_finite_leaves_it_alone() -> None:
    """Token 255 occurs in one row of step 2 only, and its embedding is NaN."""
    start = run(JOB, Layout(), 1).after
    for kind in ("param", "ema"):
        start[f"{kind}.model.embed_tokens.weight"][255] = np.nan
    after = run(JOB, Layout(dp_shard=2), 2, first=2, state=start, planted=(2, 6, 255), below=255).after
    for key, value in start.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


def test_goes_with_any_optimizer() -> None:
    state = run(job_with_optimizer("sgd", training={"ema_decay": 0.5}), Layout(dp_shard=2), 1).after
    assert {key.partition(".")[0] for key in state} == {"param", "momentum_buffer", "ema"}
