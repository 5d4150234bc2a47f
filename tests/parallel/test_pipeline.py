"""Evaluation through a pipeline; training is tested against one rank in ``tests/training/test_pipelines.py``."""

from __future__ import annotations

import pytest

from elastic_train.config.layout import Layout
from tests.parallel.pipelines import MICRO_BATCHES, evaluate_and_run
from tests.ranks import run_ranks
from tests.training.synthetic import small_job


@pytest.mark.parametrize(
    ("pipeline", "layout", "document_mask"),
    [
        ("gpipe", Layout(pp=2), False),
        ("1f1b", Layout(pp=2, dp_shard=2), True),
        ("interleaved_1f1b", Layout(pp=2, tp=2), True),
        ("zero_bubble", Layout(pp=3), False),
        ("zbv", Layout(pp=2), False),
        ("zbv", Layout(pp=2, dp_shard=2), True),
    ],
    ids=str,
)
def test_evaluation_gives_the_losses_of_training(pipeline: str, layout: Layout, document_mask: bool) -> None:
    """Bitwise, without gradients, for any number of micro-batches, and with the weights as they are then."""
    job = small_job(
        model={"num_hidden_layers": 6}, data={"document_mask": document_mask}, parallel={"pipeline": pipeline}
    )
    results = run_ranks(evaluate_and_run, layout.world_size, job, layout)
    ranks_with_losses = [rank for rank, (losses, _) in enumerate(results) if losses["evaluated"]]
    expected = 0 if pipeline == "zbv" else layout.pp - 1
    assert {layout.coordinates(rank).pp for rank in ranks_with_losses} == {expected}
    assert not any(left for _, left in results)
    for losses in (results[rank][0] for rank in ranks_with_losses):
        assert losses["evaluated"] == losses["trained"]
        assert len(losses["evaluated"]) == MICRO_BATCHES
        assert len(losses["more"]) == MICRO_BATCHES + 1
        assert losses["more"][:MICRO_BATCHES] == losses["evaluated"]
        assert losses["evaluated with other weights"] == losses["trained with other weights"]
        assert losses["evaluated with other weights"] != losses["evaluated"]
