"""Sizes, batches and numbers at their limits: training stays right, or nothing is updated anywhere."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from tests.ranks import RankError, run_ranks
from tests.training.optimizer_runs import evaluate_wrong_tokens, job_with_optimizer
from tests.training.runs import Run, run
from tests.training.synthetic import small_job

# One block, two tokens, sequences of one token; of six rows over four ranks the last one holds none, of two rows two.
TINY: dict[str, Any] = {
    "model": {
        "hidden_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 6,
        "vocab_size": 2,
    },
    "data": {"sequence_length": 1},
}

SMALLEST = [
    ("adamw", "ddp", Layout(dp_replicate=4)),
    ("adamw", "zero1", Layout(dp_shard=4)),
    ("adamw", "zero2", Layout(dp_shard=4)),
    ("adamw", "zero3", Layout(dp_shard=4)),
    ("adamw", "hsdp", Layout(dp_replicate=2, dp_shard=4)),
    ("adamw", "zero3", Layout(tp=2)),
    ("adamw", "zero1", Layout(dp_shard=3, tp=2)),
    ("muon", "ddp", Layout(dp_replicate=4)),
    ("muon", "zero1", Layout(dp_shard=4)),
    ("muon", "zero2", Layout(dp_shard=4)),
    ("muon", "zero3", Layout(dp_shard=4)),
    ("sgd", "zero2", Layout(dp_shard=4)),
    ("lion", "zero1", Layout(dp_shard=4)),
]


def smallest(optimizer: str, data: str, layout: Layout) -> Job:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2} if layout.tp > 1 else {}
    sections = {"model": TINY["model"] | heads, "data": {"sequence_length": layout.tp}}
    return job_with_optimizer(optimizer, **sections, parallel={"data": data})


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "data", "layout"), SMALLEST, ids=str)
def test_the_smallest_model_with_empty_shards(optimizer: str, data: str, layout: Layout) -> None:
    expected = run(smallest(optimizer, "zero3", layout), Layout(), 3)
    actual = run(smallest(optimizer, data, layout), layout, 3)
    assert expected.losses[0] == pytest.approx(math.log(2), rel=0.05)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5)
    assert actual.after.keys() == expected.after.keys()


AXES: list[tuple[dict[str, Any], Layout]] = [
    ({"parallel": {"data": "ddp"}}, Layout(dp_replicate=2)),
    ({"parallel": {"data": "zero1"}}, Layout(dp_shard=2)),
    ({"parallel": {"data": "zero2"}}, Layout(dp_shard=2)),
    ({"parallel": {"data": "zero2"}, "training": {"precision": "bf16"}}, Layout(dp_shard=2)),
    ({"parallel": {"data": "hsdp"}}, Layout(dp_replicate=2, dp_shard=2)),
    ({"parallel": {"pipeline": "zbv"}, "model": {"num_hidden_layers": 4}}, Layout(pp=2)),
    ({"model": {"tie_word_embeddings": True}}, Layout(pp=2)),
    ({}, Layout(cp=2)),
    ({"parallel": {"context": "ulysses"}}, Layout(cp=2)),
    ({"training": {"determinism": "exact"}, "parallel": {"data": "zero1"}}, Layout(dp_shard=2)),
    ({"training": {"ema_decay": 0.9}, "parallel": {"data": "zero1"}}, Layout(dp_shard=2)),
]


@lru_cache
def one_step(tied: bool, averaged: bool) -> Run:
    average = {"training": {"ema_decay": 0.9}} if averaged else {}
    return run(small_job(model={"tie_word_embeddings": tied}, **average), Layout(), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "layout"), AXES, ids=str)
def test_nan_in_one_micro_batch_updates_nothing_anywhere(sections: dict[str, dict[str, Any]], layout: Layout) -> None:
    """NU-04, NU-06: token 255 is in one row of step 2, and its embedding is NaN; step 3 goes on."""
    job = small_job(**sections)
    first = one_step(job.model.tie_word_embeddings, job.training.ema_decay is not None)
    start = {key: value.copy() for key, value in first.after.items()}
    start["param.model.embed_tokens.weight"][255] = np.nan
    stopped = run(job, layout, 2, first=2, state=start, planted=(2, 6, 255), below=255)
    assert math.isnan(stopped.losses[0]) and math.isnan(stopped.norms[0])
    assert stopped.after.keys() == start.keys()
    for key, value in start.items():
        np.testing.assert_array_equal(stopped.after[key], value, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "layout"), AXES, ids=str)
def test_a_step_of_padding_only_has_no_loss_and_no_gradient(
    sections: dict[str, dict[str, Any]], layout: Layout
) -> None:
    """NU-08, with every row empty: weights only decay, as on one rank; the averages follow."""
    sections = sections | {"optimizer": {"weight_decay": 0.1}}
    result = run(small_job(**sections), layout, 1, empty_rows=tuple(range(8)))
    assert (result.losses, result.norms, result.metrics[0].valid_tokens) == ([0.0], [0.0], 0)
    assert all(np.isfinite(value).all() for value in result.after.values())
    factor = np.float32(1 - result.metrics[0].lr * 0.1)
    for key, before in result.before.items():
        decays = key.startswith("param.") and "norm" not in key and "embed" not in key
        if not key.startswith("ema."):
            np.testing.assert_allclose(result.after[key], before * factor if decays else before, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp_shard=2)], ids=str)
@pytest.mark.parametrize("token", [256, -1])
def test_a_token_outside_the_vocabulary_never_counts(layout: Layout, token: int) -> None:
    """Tensor ranks look a token up where it is theirs: they would all take it for somebody else's."""
    with pytest.raises(RankError, match=f"the data has the input id {token}, outside the 256 of model.vocab_size=256"):
        run(small_job(), layout, 1, planted=(1, 6, token))


def test_a_label_outside_the_vocabulary_never_counts() -> None:
    """The last token of a sample is a label only."""
    with pytest.raises(RankError, match=r"the data has the label 256, outside the 256 of model\.vocab_size=256"):
        run(small_job(), Layout(tp=2), 1, planted=(1, 6, 256), last=True)


def test_an_evaluation_refuses_such_tokens_too() -> None:
    job = small_job(evaluation={"uri": "memory", "samples": 4})
    for error in run_ranks(evaluate_wrong_tokens, 2, job, Layout(tp=2)):
        assert error.startswith("the data has the input id") and error.endswith("of model.vocab_size=256")
