from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastic_train.config.layout import Layout
from tests.ranks import RankError, run_ranks
from tests.training.runs import count_beats, late_imports, run, waits_for_data
from tests.training.synthetic import small_job


def test_loss_does_not_depend_on_the_cut_into_micro_batches() -> None:
    """LOSS-01: The sum over valid tokens is divided once, by the global number: not a mean of means."""
    one, two, four = (run(small_job(training={"micro_batch": size}), Layout(), 3, masked=0.9) for size in (1, 2, 4))
    for other in (two, four):
        np.testing.assert_allclose(other.losses, one.losses, rtol=1e-6)
        np.testing.assert_allclose(other.norms, one.norms, rtol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_pipeline_does_not_rescale_gradients(micro_batch: int) -> None:  # LOSS-05
    job = small_job(training={"micro_batch": micro_batch})
    np.testing.assert_allclose(run(job, Layout(pp=2), 2).norms, run(job, Layout(), 2).norms, rtol=1e-6)


def test_a_data_rank_without_valid_tokens_takes_part() -> None:
    masked = {"empty_rows": (4, 5, 6, 7)}
    expected = run(small_job(), Layout(), 2, **masked)
    actual = run(small_job(), Layout(dp_shard=2), 2, **masked)
    assert expected.metrics[0].valid_tokens == 4 * 32
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-6)


def test_an_empty_row_changes_nothing() -> None:  # NU-08
    with_row = run(small_job(training={"global_batch": 4}), Layout(), 2, empty_rows=(3,))
    without = run(small_job(training={"global_batch": 3}), Layout(), 2)
    np.testing.assert_allclose(with_row.losses, without.losses, rtol=1e-6)
    np.testing.assert_allclose(with_row.norms, without.norms, rtol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_zero_gradient_decays_matrices_only(tied: bool) -> None:  # OP-06
    """lr 1e-2, weight decay 0.1: projections x 0.999, norms exactly 1, embedding (and a head tied to it) untouched."""
    job = small_job(
        model={"tie_word_embeddings": tied},
        optimizer={"learning_rate": 1e-2, "weight_decay": 0.1},
        schedule={"warmup_steps": 0},
        training={"steps": 10**9},  # the cosine has not moved at step 1
    )
    result = run(job, Layout(), 1, empty_rows=tuple(range(8)))
    assert (result.losses, result.norms, result.metrics[0].valid_tokens) == ([0.0], [0.0], 0)
    for key in [key for key in result.before if key.startswith("param.")]:
        before, after = result.before[key], result.after[key]
        if "norm" in key:
            assert (after == 1.0).all()
        elif "embed_tokens" in key:
            np.testing.assert_array_equal(after, before)
        else:
            np.testing.assert_allclose(after, before * np.float32(0.999), rtol=1e-6)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(dp_shard=2), Layout(pp=2, tp=2)], ids=str)
def test_clipping_limits_the_global_norm(layout: Layout) -> None:  # LOSS-07, NU-10
    """After one step exp_avg is (1 - beta1) x the clipped gradient: its norm over all stages is known."""
    result = run(small_job(optimizer={"clip_norm": 0.25}), layout, 1)
    assert result.norms[0] > 1.0, "the logged norm is the one before clipping"
    moments = [value for key, value in result.after.items() if key.startswith("exp_avg.")]
    norm = math.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in moments))
    assert norm == pytest.approx((1 - 0.9) * 0.25, rel=1e-5)


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(pp=2, dp_shard=2), Layout(tp=2)], ids=str)
def test_nan_on_one_rank_stops_the_update_on_all(layout: Layout) -> None:
    """NU-04: Token 255 occurs in one row of step 2 only, and its embedding is NaN."""
    start = run(small_job(), Layout(), 1)
    start.after["param.model.embed_tokens.weight"][255] = np.nan
    result = run(small_job(), layout, 3, first=2, state=start.after, planted=(2, 6, 255), below=255)
    assert math.isnan(result.losses[0]) and math.isnan(result.norms[0])
    assert math.isfinite(result.losses[1]) and math.isfinite(result.norms[1])
    stopped = run(small_job(), layout, 2, first=2, state=start.after, planted=(2, 6, 255), below=255)
    for key, value in start.after.items():
        np.testing.assert_array_equal(stopped.after[key], value, err_msg=key)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=3), Layout(pp=2), Layout(tp=2)], ids=str)
def test_progress_is_reported_by_block_forward_and_backward(layout: Layout) -> None:
    micro_batches = -(-8 // layout.data_ranks)
    for beats, blocks in run_ranks(count_beats, layout.world_size, small_job(), layout):
        assert blocks == 4 // layout.pp
        assert beats == 2 * blocks * micro_batches


def test_the_wait_for_samples_is_measured() -> None:
    ((waited, told, took, then),) = run_ranks(waits_for_data, 1, small_job(), Layout())
    assert waited <= told <= took
    assert then < waited


def test_all_violations_are_in_one_error() -> None:
    with pytest.raises(RankError, match=r"num_key_value_heads=2 is not divisible by tp=3 .*; intermediate_size=128"):
        run(small_job(), Layout(tp=3), 1)


def test_import_starts_nothing_and_needs_neither_ray_nor_mlflow() -> None:
    """A forkserver imports the engine and forks: no thread, no process group may exist then."""
    code = (
        "import os, sys; import elastic_train.training.engine; import torch.distributed as dist;"
        "threads = len(os.listdir('/proc/self/task'));"
        "print(threads, dist.is_initialized(), 'ray' in sys.modules, 'mlflow' in sys.modules)"
    )
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1", "False", "False", "False"]


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(pp=2), Layout(tp=2)], ids=str)
def test_a_forked_rank_imports_nothing_heavy(layout: Layout) -> None:
    """What the first step imports is paid after every failure. torch's profiler probe is one small file."""
    for modules in run_ranks(late_imports, layout.world_size, small_job(), layout):
        assert set(modules) <= {"torch.profiler._cupti_monitor"}
