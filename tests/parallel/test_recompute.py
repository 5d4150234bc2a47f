"""Recomputation changes what is kept and nothing else: losses and gradients are bitwise the same."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from tests.ranks import run_ranks
from tests.training.runs import Run, count_beats, run
from tests.training.synthetic import small_job

# The fast tests cover this subject by the rows of test_parity.py.
pytestmark = pytest.mark.slow

CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "single": (Layout(), {}),
    "zero3": (Layout(dp_shard=2), {}),
    "zero3, weights released": (Layout(dp_shard=2), {"reshard_after_forward": True}),
    "tensor": (Layout(tp=2), {}),
    "pipeline": (Layout(pp=2), {}),
    "gather": (Layout(cp=2), {}),
    "ulysses": (Layout(cp=2), {"context": "ulysses"}),
    "all axes": (Layout(pp=2, cp=2, tp=2), {}),
}


def job(case: str, recompute: str, precision: str = "fp32") -> Job:
    return small_job(
        model={"num_key_value_heads": 4},
        data={"document_mask": True},
        training={"recompute": recompute, "precision": precision},
        parallel=CASES[case][1],
    )


@lru_cache
def truth(case: str, precision: str) -> Run:
    return run(job(case, "none", precision), CASES[case][0], 2, masked=0.5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(("case", "precision"), [*((case, "fp32") for case in CASES), ("gather", "bf16")])
def test_losses_and_gradients_are_bitwise_those_without(case: str, precision: str, recompute: str) -> None:
    expected = truth(case, precision)
    actual = run(job(case, recompute, precision), CASES[case][0], 2, masked=0.5)
    assert (actual.losses, actual.norms) == (expected.losses, expected.norms)
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(dp_shard=2)], ids=str)
def test_progress_is_reported_as_without(layout: Layout, recompute: str) -> None:
    for beats, blocks in run_ranks(count_beats, layout.world_size, job("single", recompute), layout):
        assert beats == 2 * blocks * (8 // layout.data_ranks)
