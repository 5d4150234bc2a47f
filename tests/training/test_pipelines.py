"""Every pipeline schedule computes what one rank computes: loss, pre-clip norm and every gradient."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.ranks import run_ranks
from tests.training.runs import Run, assert_same_steps, run
from tests.training.synthetic import SyntheticBatches, small_job

# The fast tests cover this subject by the rows of test_parity.py.
pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
EMBEDDING = "param.model.embed_tokens.weight"

DATA: dict[str, Any] = {"masked": 0.6, "empty_rows": (1,)}


def job_of(pipeline: str = "1f1b", *, training: dict[str, Any] | None = None, mask: bool = False, **model: Any) -> Job:
    """Layers for up to eight stages; a vocabulary that two tensor ranks cut unevenly."""
    return small_job(
        model={"num_hidden_layers": 8, "vocab_size": 131, "hidden_size": 32} | model,
        data={"sequence_length": 16, "document_mask": mask},
        training=training or {},
        parallel={"pipeline": pipeline},
    )


@lru_cache
def truth(mask: bool, **model: Any) -> Run:
    return run(job_of(mask=mask, **model), Layout(), 3, **DATA)


def compare(
    layout: Layout, pipeline: str, training: dict[str, Any] | None = None, mask: bool = False, **model: Any
) -> None:
    actual = run(job_of(pipeline, training=training, mask=mask, **model), layout, 3, **DATA)
    assert_same_steps(actual, truth(mask, **model))


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_schedule_equals_one_rank(pipeline: str) -> None:
    compare(Layout(pp=2), pipeline)


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, dp_shard=2), Layout(pp=2, dp_replicate=2), Layout(pp=2, tp=2), Layout(pp=4)],
    ids=str,
)
@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_schedule_with_another_axis(pipeline: str, layout: Layout) -> None:
    compare(layout, pipeline)


@pytest.mark.parametrize("pipeline", ["1f1b", "interleaved_1f1b", "zbv"])
def test_three_axes(pipeline: str) -> None:
    compare(Layout(pp=2, dp_shard=2, tp=2), pipeline, qkv_bias=True, mask=True)


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_padding_micro_batches_and_uneven_layers(pipeline: str) -> None:
    """8 slots over 3 data ranks: three micro-batches each, one of them padding; 7 layers, and a head as dear as two."""
    compare(Layout(pp=2, dp_shard=3), pipeline, num_hidden_layers=7, vocab_size=499)


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("pipeline", ["gpipe", "zero_bubble", "zbv"])
def test_number_of_micro_batches_changes_nothing(pipeline: str, micro_batch: int) -> None:  # LOSS-05
    """Gradients are neither divided by the number of micro-batches nor summed twice (8 of them are tested above)."""
    compare(Layout(pp=2), pipeline, training={"micro_batch": micro_batch})


def test_gpipe_runs_with_fewer_micro_batches_than_stages() -> None:  # PP-01
    compare(Layout(pp=4), "gpipe", training={"micro_batch": 8})


@pytest.mark.parametrize("slots", [10, 11])
@pytest.mark.parametrize("pipeline", ["interleaved_1f1b", "zero_bubble"])
def test_micro_batches_that_are_no_multiple_of_the_ranks(pipeline: str, slots: int) -> None:  # PP-03
    """10 on 4 ranks make the two rounds that torch wants; 11 make three with a twelfth, which is padding."""
    training = {"global_batch": slots}
    expected, actual = (
        run(job_of(name, training=training), layout, 2, **DATA)
        for name, layout in (("1f1b", Layout()), (pipeline, Layout(pp=4)))
    )
    assert_same_steps(actual, expected)


def test_one_stage_per_rank_of_the_zero_bubble_schedule() -> None:
    job = job_of("zero_bubble")
    single = job.model_copy(update={"parallel": job.parallel.model_copy(update={"virtual_stages": 1})})
    assert_same_steps(run(single, Layout(pp=2), 3, **DATA), truth(False))


@pytest.mark.parametrize("pipeline", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_tied_embeddings(pipeline: str) -> None:
    compare(Layout(pp=2), pipeline, tie_word_embeddings=True)


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(pp=2, dp_shard=2), Layout(pp=2, tp=2)], ids=str)
def test_tied_embeddings_with_another_axis(pipeline: str, layout: Layout) -> None:
    compare(layout, pipeline, tie_word_embeddings=True)


def embedding_digests(rank: int, job: Job, layout: Layout, steps: int) -> list[str]:
    """Of this rank's part of the embedding and its moments after every step; empty strings where it has none."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    digests = []
    for step in range(1, steps + 1):
        engine.train_step(step)
        parts = [shard.tensor for key, shard in engine.state().items() if "embed_tokens" in key]
        digests.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest() if parts else "")
    return digests


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3), Layout(pp=2, dp_shard=2)], ids=str)
def test_copies_of_a_tied_embedding_are_equal_after_every_step(layout: Layout) -> None:  # PP-05
    ranks = run_ranks(
        embedding_digests, layout.world_size, job_of(tie_word_embeddings=True, num_hidden_layers=3), layout, 20
    )
    stride = layout.world_size // layout.pp
    for place in range(stride):
        assert ranks[place] == ranks[place + (layout.pp - 1) * stride]
        assert len(set(ranks[place])) == 20
    if layout.pp == 3:
        assert set(ranks[1]) == {""}


def test_twenty_steps_with_a_tied_embedding_equal_one_rank() -> None:  # PP-05
    job = job_of(tie_word_embeddings=True, num_hidden_layers=3)
    expected, actual = (run(job, layout, 20) for layout in (Layout(), Layout(pp=2)))
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(actual.after[EMBEDDING], expected.after[EMBEDDING], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("pipeline", "layout", "tied"),
    [("zbv", Layout(pp=2), False), ("interleaved_1f1b", Layout(pp=2, tp=2), True), ("1f1b", Layout(pp=3), True)],
    ids=str,
)
def test_clipping_is_by_the_norm_over_all_stages(pipeline: str, layout: Layout, tied: bool) -> None:  # LOSS-07
    """After one step exp_avg is (1 - beta1) x the clipped gradient, whose norm over all stages is the limit."""
    job = job_of(pipeline, tie_word_embeddings=tied)
    clipped = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_norm": 0.25})})
    result = run(clipped, layout, 1)
    assert result.norms[0] > 1.0
    moments = [value for key, value in result.after.items() if key.startswith("exp_avg.")]
    norm = math.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in moments))
    assert norm == pytest.approx((1 - 0.9) * 0.25, rel=1e-5)


def test_norm_weights_stay_equal_on_tensor_ranks() -> None:
    """LOSS-08: ``run`` compares replicas bit for bit; after 20 steps they equal those of one rank."""
    expected, actual = (run(job_of(num_hidden_layers=2), layout, 20) for layout in (Layout(), Layout(tp=2)))
    norms = [key for key in expected.after if key.startswith("param.") and "norm" in key]
    assert len(norms) == 2 * 2 + 1
    for key in norms:
        np.testing.assert_allclose(actual.after[key], expected.after[key], rtol=TOLERANCE, err_msg=key)


@pytest.mark.parametrize("pipeline", ["gpipe", "interleaved_1f1b", "zbv"])
def test_bfloat16(pipeline: str) -> None:
    """Stages round activations where one rank rounds them, and the loss and the sums are float32."""
    # zbv adds the gradients of the micro-batches in bf16, and is refused with any other reduction.
    training = {"precision": "bf16", "reduce_dtype": "bf16" if pipeline == "zbv" else "fp32"}
    expected = run(job_of(training=training), Layout(dp_shard=2), 3, **DATA)
    actual = run(job_of(pipeline, training=training), Layout(pp=2, dp_shard=2), 3, **DATA)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-4)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-2)
