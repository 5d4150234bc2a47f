"""``determinism: exact``: one job has one sequence of bits, whatever the layout."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.training.optimizers.adam import LocalAdam
from tests.ranks import run_ranks
from tests.training.exact_bits import bits, digests
from tests.training.optimizer_runs import train_and_evaluate
from tests.training.runs import Run, assemble, loss_and_norm, run
from tests.training.synthetic import small_job

STEPS = 30
MASKED = 0.6

# Every number of data ranks (dp_replicate x dp_shard) with every number of stages, and four of them in every way.
DATA = [(1, 1), (1, 2), (3, 1), (2, 2), (1, 5), (2, 4)]
LAYOUTS = [
    Layout(pp=pp, dp_replicate=replicas, dp_shard=shards)
    for pp, data in ((1, [*DATA, (1, 4), (4, 1)]), (2, [*DATA, (1, 4), (4, 1)]), (4, DATA))
    for replicas, shards in data
    if pp * replicas * shards > 1
]
FAST = [Layout(dp_shard=3), Layout(pp=2, dp_replicate=2), Layout(pp=2, dp_replicate=2, dp_shard=2)]


def job(determinism: str = "exact", **sections: dict[str, Any]) -> Job:
    """32 slots of one short sequence; hidden size and vocabulary divide neither by 3 nor by 5."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "hidden_size": 28,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 50,
            "vocab_size": 71,
        },
        "data": {"sequence_length": 16},
        "training": {"steps": STEPS, "global_batch": 32, "determinism": determinism},
    }
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    return small_job(**values)


@lru_cache
def truth(steps: int, determinism: str = "exact") -> Run:
    return run(job(determinism), Layout(), steps, masked=MASKED)


def same_bits(actual: Run, expected: Run) -> bool:
    return bits(actual.metrics, actual.after) == bits(expected.metrics, expected.after)


@pytest.mark.parametrize("layout", FAST, ids=str)
def test_six_steps_have_the_bits_of_one_rank(layout: Layout) -> None:
    assert same_bits(run(job(), layout, 6, masked=MASKED), truth(6))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_thirty_steps_have_the_bits_of_one_rank(layout: Layout) -> None:
    """Losses, norms before clipping, and the SHA-256 of every weight and moment."""
    ranks = run_ranks(train_and_evaluate, layout.world_size, job(), layout, STEPS, None)
    assert all(repr(metrics) == repr(ranks[0][0]) for metrics, _ in ranks), "ranks report different metrics"
    actual = bits(ranks[0][0], assemble([pieces for _, pieces in ranks]))
    assert actual == bits(truth(STEPS).metrics, truth(STEPS).after)


@pytest.mark.slow
def test_the_default_mode_does_not_and_exact_agrees_with_it() -> None:
    """Otherwise the tests of this file could not fail, or exact could train something else."""
    default = truth(6, "default")
    other = run(job("default"), Layout(dp_shard=3), 6, masked=MASKED)
    assert other.losses != default.losses and other.norms != default.norms
    np.testing.assert_allclose(truth(6).losses, default.losses, rtol=1e-5)
    np.testing.assert_allclose(truth(6).norms, default.norms, rtol=1e-5)


@pytest.mark.slow
def test_thirty_steps_agree_with_the_default_mode() -> None:
    exact, default = truth(STEPS), truth(STEPS, "default")
    assert exact.losses[-1] < exact.losses[0] - 0.1, "the reference learns nothing"
    np.testing.assert_allclose(exact.losses, default.losses, rtol=1e-5)
    np.testing.assert_allclose(exact.norms, default.norms, rtol=1e-5)


@pytest.mark.slow
def test_changing_the_layout_on_the_way_changes_no_bit() -> None:
    """Ten steps on three ranks, ten on two stages of two, ten on one rank, the state carried over in between."""
    layouts = [Layout(dp_shard=3), Layout(pp=2, dp_shard=2), Layout()]
    state, losses = None, []
    for start, layout in zip((1, 11, 21), layouts, strict=True):
        part = run(job(), layout, start + 9, first=start, state=state, masked=MASKED)
        state, losses = part.after, losses + part.losses
    assert losses == truth(STEPS).losses
    assert state is not None and digests(state) == digests(truth(STEPS).after)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=3), Layout(pp=2, dp_replicate=2)], ids=str)
def test_a_gradient_that_is_out_of_range_stops_the_update_on_all(layout: Layout) -> None:
    """A head of 1e6 makes gradients of the embedding far larger than 128, at a finite loss."""
    start = dict(truth(6).before)
    start["param.lm_head.weight"] = start["param.lm_head.weight"] * np.float32(1e6)
    result = run(job(), layout, 1, state=start, masked=MASKED)
    assert math.isfinite(result.losses[0]) and math.isnan(result.norms[0])
    assert digests(result.after) == digests(start)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2), Layout(pp=2)], ids=str)
def test_nan_in_one_slot_stops_the_update_on_all(layout: Layout) -> None:
    """Token 70 occurs in one row of step 1 only, and its embedding is NaN."""
    start = dict(truth(6).before)
    start["param.model.embed_tokens.weight"] = start["param.model.embed_tokens.weight"].copy()
    start["param.model.embed_tokens.weight"][70] = np.nan
    result = run(job(), layout, 1, state=start, planted=(1, 30, 70), below=70)
    assert math.isnan(result.losses[0]) and math.isnan(result.norms[0])
    assert digests(result.after) == digests(start)


def test_padding_adds_nothing_even_where_its_token_has_no_value() -> None:
    """Three data ranks pad with token 0, whose embedding is NaN, and which occurs nowhere else in the first step."""
    start = dict(truth(6).before)
    start["param.model.embed_tokens.weight"] = start["param.model.embed_tokens.weight"].copy()
    start["param.model.embed_tokens.weight"][0] = np.nan
    alone, padded = (run(job(), layout, 1, state=start, above=1) for layout in (Layout(), Layout(dp_shard=3)))
    assert math.isfinite(alone.losses[0]) and math.isfinite(alone.norms[0])
    assert same_bits(padded, alone)


def test_loss_is_summed_by_slot_and_the_norm_counts_copies_once() -> None:
    """Padding's loss (9) does not count; 3 and 4 make a norm of 5, also where two ranks hold both."""
    losses = [[0.25, 0.5], [1.0, 9.0], [2.0, 9.0]]
    for cut, copies in ([[3.0], [4.0], []], 1), ([[3.0, 4.0]] * 3, 3):
        assert run_ranks(loss_and_norm, 3, Layout(dp_shard=3), losses, cut, copies, None) == [(3.75, 5.0)] * 3


def test_a_rank_whose_sums_mean_nothing_makes_the_norm_nan_on_all() -> None:
    losses = [[0.25, 0.5], [1.0, 2.0]]
    for loss, norm in run_ranks(loss_and_norm, 2, Layout(dp_shard=2), losses, [[3.0], [4.0]], 1, 1):
        assert loss == 3.75 and math.isnan(norm)


def test_the_norm_does_not_depend_on_the_cut_and_is_right() -> None:
    """Values of very different sizes; the reference adds exact squares."""
    values = (np.random.default_rng(1).standard_normal(3000) ** 5).astype(np.float32)
    expected = math.sqrt(math.fsum(float(value) ** 2 for value in values))
    norms = set()
    for cut in (0, 1, 1024, 2999):
        parts = [values[:cut].tolist(), values[cut:].tolist()]
        norms |= {norm for _, norm in run_ranks(loss_and_norm, 2, Layout(dp_shard=2), [[], []], parts, 1, None)}
    assert len(norms) == 1 and norms.pop() == pytest.approx(expected, rel=1e-9)


def test_the_update_of_an_element_does_not_depend_on_where_its_tensor_is_cut() -> None:
    torch.manual_seed(0)
    values = [torch.randn(1003) * scale for scale in (1.0, 1e-2, 1e-2)] + [torch.rand(1003) * 1e-3]

    def updated(cuts: list[int]) -> bytes:
        pieces = [torch.split(value.clone(), cuts) for value in values]
        weights = {f"{index}.q_proj.weight": piece[:, None] for index, piece in enumerate(pieces[0])}
        optimizer = LocalAdam(weights, OptimizerConfig(weight_decay=0.1), decoupled=True, fused=False)
        for kind, parts in zip(("exp_avg", "exp_avg_sq"), pieces[2:], strict=True):
            for name, part in zip(weights, parts, strict=True):
                optimizer.state[kind][name].copy_(part[:, None])
        optimizer.step(dict(zip(weights, (piece[:, None] for piece in pieces[1]), strict=True)), step=7, lr=1e-3)
        tensors = [weights, *optimizer.state.values()]
        return b"".join(torch.cat(list(tensor.values())).numpy().tobytes() for tensor in tensors)

    whole = updated([1003])
    for cuts in ([1] * 1003, [1, 1002], [333, 333, 337], [17, 986], [500, 503]):
        assert updated(cuts) == whole
