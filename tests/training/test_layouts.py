"""Every layout computes the same thing: the one-rank run is the truth, at the same samples per step."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.layout import Layout
from tests.training.runs import Run, run
from tests.training.synthetic import small_job

TOLERANCE = 1e-5

LAYOUTS = [
    Layout(pp=2),
    Layout(dp_shard=2),
    Layout(dp_shard=3),  # 4 slots: two, one and one, so two of the micro-batches are padding
    Layout(dp_replicate=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(tp=2),
    Layout(pp=2, dp_shard=2),
    Layout(dp_shard=2, tp=2),
    Layout(pp=2, dp_shard=2, tp=2),
]

UNEVEN = {
    # Nothing divides: 90 over 4, 1003 over 2 and 3, 5 layers over 2; heads and feed-forward must divide tp=3.
    "odd": {
        "model": {
            "hidden_size": 90,
            "num_hidden_layers": 5,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 111,
            "vocab_size": 1003,
        },
        "data": {"sequence_length": 33},
    },
    # Six elements over four ranks: the last one holds nothing of any norm and of most matrices.
    "empty": {"model": {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 6}},
    "tied": {"model": {"tie_word_embeddings": True, "vocab_size": 131}},
}

UNEVEN_LAYOUTS = [
    ("odd", Layout(tp=3)),
    ("odd", Layout(dp_shard=4)),
    ("odd", Layout(dp_shard=2, tp=3)),
    ("odd", Layout(pp=2)),
    ("odd", Layout(pp=2, dp_replicate=2)),
    ("empty", Layout(dp_shard=4)),
    ("empty", Layout(dp_replicate=2, dp_shard=2)),
    ("tied", Layout(dp_shard=2)),
    ("tied", Layout(tp=2)),
    ("tied", Layout(dp_shard=2, tp=2)),
]


def job(name: str = "even") -> Any:
    sections = UNEVEN.get(name, {})
    return small_job(training={"micro_batch": 2}, **sections)


@lru_cache
def truth(name: str, steps: int) -> Run:
    return run(job(name), Layout(), steps, masked=0.6)


def compare(actual: Run, expected: Run) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=TOLERANCE)
    assert [m.lr for m in actual.metrics] == [m.lr for m in expected.metrics]
    assert [m.valid_tokens for m in actual.metrics] == [m.valid_tokens for m in expected.metrics]
    assert actual.before.keys() == expected.before.keys()
    for key, value in expected.before.items():
        np.testing.assert_array_equal(actual.before[key], value, err_msg=key)
    for key, value in expected.after.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(actual.after[key], value, rtol=0, atol=1e-4 * scale, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_twenty_steps_equal_one_rank(layout: Layout) -> None:
    """Losses, pre-clip norms, initial weights (bitwise) and final state; replicas stay bitwise equal on the way."""
    expected = truth("even", 20)
    assert expected.losses[-1] < expected.losses[0] - 0.1, "the reference learns nothing"
    compare(run(job(), layout, 20, masked=0.6), expected)


@pytest.mark.parametrize(("name", "layout"), UNEVEN_LAYOUTS, ids=str)
def test_sizes_that_divide_nothing(name: str, layout: Layout) -> None:
    """The boxes of ``state()`` tile every tensor (``run`` checks it) and training is the same."""
    compare(run(job(name), layout, 4, masked=0.6), truth(name, 4))


def test_state_holds_every_tensor_from_step_0() -> None:
    state = truth("even", 20).before
    assert len(state) == 3 * (4 * 9 + 3)
    assert state["param.model.layers.3.self_attn.k_proj.weight"].shape == (32, 64)
    assert not any(value.any() for key, value in state.items() if not key.startswith("param."))
    assert all((value == 1).all() for key, value in state.items() if key.startswith("param.") and "norm" in key)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=3), Layout(pp=2, tp=2)], ids=str)
def test_a_run_continues_from_written_state(layout: Layout) -> None:
    """Steps 1-3 on (dp 2), then 4-6 on another layout: bias correction and rate come from the step number."""
    start = run(job(), Layout(dp_shard=2), 3, masked=0.6)
    rest = run(job(), layout, 6, first=4, state=start.after, masked=0.6)
    for key, value in start.after.items():
        np.testing.assert_array_equal(rest.before[key], value)
    np.testing.assert_allclose(rest.losses, truth("even", 20).losses[3:6], rtol=TOLERANCE)
    np.testing.assert_allclose(rest.norms, truth("even", 20).norms[3:6], rtol=TOLERANCE)


def test_seeds_differ() -> None:
    other = run(small_job().model_copy(update={"seed": 2}), Layout(), 1)
    assert (truth("even", 20).before["param.lm_head.weight"] != other.before["param.lm_head.weight"]).mean() > 0.9
