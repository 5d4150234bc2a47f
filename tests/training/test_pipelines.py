"""Every pipeline schedule computes what one rank computes: loss, pre-clip norm and every gradient."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.ranks import run_ranks
from tests.training.runs import Array, Piece, assemble
from tests.training.synthetic import SyntheticBatches, small_job

TOLERANCE = 1e-5
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]

Step = tuple[float, float, dict[str, Piece]]
"""Loss, pre-clip norm and this rank's pieces of the gradients."""


def gradients_of(rank: int, job: Job, layout: Layout, steps: int) -> list[Step]:
    engine = Engine(job, layout, rank, SyntheticBatches(job, masked=0.6))
    engine.initialize()
    results = []
    for step in range(1, steps + 1):
        found = engine.compute_gradients(step)
        places = engine.state()
        parts: dict[str, Piece] = {}
        for name, gradient in found.shards.items():
            place = places[f"param.{name}"]
            parts[name] = (place.global_shape, place.offsets, gradient.float().cpu().numpy().copy())
        results.append((found.loss, found.norm, parts))
        engine.update(step, found)
    return results


def whole_gradients(job: Job, layout: Layout, steps: int = 3) -> list[tuple[float, float, dict[str, Array]]]:
    ranks = run_ranks(gradients_of, layout.world_size, job, layout, steps)
    return [(*ranks[0][step][:2], assemble([rank[step][2] for rank in ranks])) for step in range(steps)]


def job_of(pipeline: str = "1f1b", *, tied: bool = False, layers: int = 8, **training: Any) -> Job:
    """Layers for up to eight stages; a vocabulary that two tensor ranks cut unevenly."""
    return small_job(
        model={"num_hidden_layers": layers, "tie_word_embeddings": tied, "vocab_size": 131, "hidden_size": 32},
        data={"sequence_length": 16},
        training=training,
        parallel={"pipeline": pipeline},
    )


@lru_cache
def truth(tied: bool = False, layers: int = 8) -> list[tuple[float, float, dict[str, Array]]]:
    return whole_gradients(job_of(tied=tied, layers=layers), Layout())


def compare(job: Job, layout: Layout) -> None:
    expected = truth(job.model.tie_word_embeddings, job.model.num_hidden_layers)
    for (loss, norm, gradients), (true_loss, true_norm, true_gradients) in zip(
        whole_gradients(job, layout), expected, strict=True
    ):
        assert loss == pytest.approx(true_loss, rel=TOLERANCE)
        assert norm == pytest.approx(true_norm, rel=TOLERANCE)
        assert gradients.keys() == true_gradients.keys()
        for name, value in true_gradients.items():
            np.testing.assert_allclose(
                gradients[name], value, rtol=0, atol=TOLERANCE * np.abs(value).max(), err_msg=name
            )


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_schedule_equals_one_rank(pipeline: str) -> None:
    compare(job_of(pipeline), Layout(pp=2))


@pytest.mark.parametrize(
    "layout", [Layout(pp=2, dp_shard=2), Layout(pp=2, dp_replicate=2), Layout(pp=2, tp=2)], ids=str
)
@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_schedule_with_another_axis(pipeline: str, layout: Layout) -> None:
    compare(job_of(pipeline), layout)


@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_padding_micro_batches_and_uneven_layers(pipeline: str) -> None:
    """8 slots over 3 data ranks: three micro-batches each, one of them padding; 7 layers."""
    compare(job_of(pipeline, layers=7), Layout(pp=2, dp_shard=3))


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3), Layout(pp=2, dp_shard=2), Layout(pp=2, tp=2)], ids=str)
def test_tied_embeddings(pipeline: str, layout: Layout) -> None:
    if not (pipeline == "interleaved_1f1b" and layout.pp == 3):
        compare(job_of(pipeline, tied=True), layout)


@pytest.mark.parametrize("pipeline", ["interleaved_1f1b", "zero_bubble", "zbv"])
def test_four_ranks(pipeline: str) -> None:
    compare(job_of(pipeline), Layout(pp=4))
