from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import StepMetrics
from elastic_train.training.evaluation import is_due, rounds
from tests.ranks import RankError, run_ranks
from tests.training.optimizer_runs import NumberedSamples, evaluate_at, evaluation_of, train_and_evaluate
from tests.training.runs import Array, assemble, run
from tests.training.synthetic import small_job

LAYOUTS = [
    Layout(dp_shard=3),
    Layout(dp_replicate=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, dp_shard=2),
    Layout(cp=2),
    Layout(cp=4),
    Layout(dp_shard=2, cp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
]


def job(evaluation: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Job:
    """Seven samples after every second of five steps: in micro-batches of two, over most layouts, with padding."""
    given = {"uri": "memory", "every_steps": 2, "samples": 7} if evaluation is None else evaluation
    sections.setdefault("training", {})
    sections["training"] = {"steps": 5, "micro_batch": 2} | sections["training"]
    return small_job(evaluation=given, **sections)


def train(
    made: Job, layout: Layout, state: dict[str, Array] | None = None
) -> tuple[list[StepMetrics], dict[str, Array]]:
    ranks = run_ranks(train_and_evaluate, layout.world_size, made, layout, made.training.steps, state)
    assert all(repr(metrics) == repr(ranks[0][0]) for metrics, _ in ranks), "ranks report different metrics"
    return ranks[0][0], assemble([pieces for _, pieces in ranks])


@lru_cache
def alone() -> list[StepMetrics]:
    return train(job(), Layout())[0]


def test_is_due_every_so_many_steps_and_at_the_end() -> None:
    assert [step.step for step in alone() if step.eval_loss is not None] == [2, 4, 5]
    assert [step for step in range(1, 6) if is_due(job(), step)] == [2, 4, 5]
    assert not any(is_due(small_job(), step) for step in (1, 20))


def test_is_the_mean_over_the_valid_tokens_of_the_first_samples() -> None:
    """What a training step over these samples says, from the weights after the last step."""
    metrics, state = train(job(), Layout())
    (losses,) = run_ranks(evaluate_at, 1, job(), Layout(), state)
    assert losses[0] == metrics[-1].eval_loss
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_evaluates_to_the_same(layout: Layout) -> None:  # LOSS-04
    metrics, _ = train(job(), layout)
    np.testing.assert_allclose(evaluations(metrics), evaluations(alone()), rtol=1e-5)


@lru_cache
def trained_weights(heads: int) -> dict[str, Array]:
    """After one step, so that norms and moments are not those of a start."""
    return run(small_job(model={"num_key_value_heads": heads}), Layout(), 1).after


def assert_evaluates_as_one_rank(made: Job, *layouts: Layout) -> None:
    """At the same weights, to 1e-6."""
    state = trained_weights(made.model.num_key_value_heads)
    (expected,) = run_ranks(evaluate_at, 1, made, Layout(), state)
    for layout in layouts:
        losses = [evaluated for evaluated, _ in run_ranks(evaluate_at, layout.world_size, made, layout, state)]
        assert losses == pytest.approx([expected[0]] * layout.world_size, rel=1e-6), str(layout)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("context", ["gather", "ulysses"])
def test_context_ranks_do_not_matter(context: str, masked: bool) -> None:
    """Sequences cut into 1, 2 and 4 parts. Of the cases on loss: LOSS-04."""
    made = job(model={"num_key_value_heads": 4}, parallel={"context": context}, data={"document_mask": masked})
    assert_evaluates_as_one_rank(made, Layout(cp=2), Layout(cp=4), Layout(cp=2, dp_shard=2))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("pipeline", ["interleaved_1f1b", "zbv"])
def test_virtual_stages_do_not_matter(pipeline: str, masked: bool) -> None:
    made = job(parallel={"pipeline": pipeline}, data={"document_mask": masked})
    assert_evaluates_as_one_rank(made, Layout(pp=2), Layout(pp=2, dp_shard=2))


def test_document_masks_do_matter() -> None:
    state = trained_weights(2)
    (causal,), (masked,) = (
        run_ranks(evaluate_at, 1, job(data={"document_mask": mask}), Layout(), state) for mask in (False, True)
    )
    assert masked[0] != pytest.approx(causal[0], rel=1e-4)
    assert masked[1] == pytest.approx(masked[0], rel=1e-6)


STRATEGIES: list[tuple[dict[str, dict[str, Any]], Layout]] = [
    ({"parallel": {"data": "ddp"}}, Layout(dp_replicate=3)),
    ({"parallel": {"data": "zero1"}}, Layout(dp_shard=3)),
    ({"parallel": {"data": "zero2"}}, Layout(dp_shard=3)),
    ({"parallel": {"data": "hsdp"}}, Layout(dp_replicate=2, dp_shard=2)),
    ({"parallel": {"pipeline": "gpipe"}}, Layout(pp=2)),
    ({"parallel": {"pipeline": "interleaved_1f1b"}}, Layout(pp=2)),
    ({"parallel": {"pipeline": "zero_bubble"}}, Layout(pp=2)),
    ({"parallel": {"pipeline": "zbv", "data": "zero1"}}, Layout(pp=2, dp_shard=2)),
    ({"parallel": {"context": "ulysses"}}, Layout(cp=2)),
    ({"training": {"recompute": "full"}}, Layout(pp=2)),
    ({"training": {"recompute": "selective"}}, Layout(cp=2)),
    ({"training": {"determinism": "exact"}}, Layout(pp=2, dp_shard=2)),
]


@lru_cache
def averaged_alone() -> list[StepMetrics]:
    return train(job(training={"ema_decay": 0.9}), Layout())[0]


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "layout"), STRATEGIES, ids=str)
def test_every_strategy_evaluates_to_the_same(sections: dict[str, dict[str, Any]], layout: Layout) -> None:
    """LOSS-04: the weights after each update, and their average."""
    sections = sections | {"training": {"ema_decay": 0.9} | sections.get("training", {})}
    metrics, _ = train(job(**sections), layout)
    np.testing.assert_allclose(evaluations(metrics), evaluations(averaged_alone()), rtol=1e-5)
    ours, theirs = (
        [step.eval_loss_ema for step in steps if step.eval_loss_ema] for steps in (metrics, averaged_alone())
    )
    assert len(ours) == 3
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("training", [{"micro_batch": 1}, {"micro_batch": 4}, {"global_batch": 2}], ids=str)
def test_accumulation_does_not_matter(training: dict[str, int]) -> None:
    """At the same weights; with a batch of two an evaluation takes four rounds of one micro-batch."""
    state = run(small_job(), Layout(), 1).after
    (expected,), (actual,) = (
        run_ranks(evaluate_at, 1, made, Layout(), state) for made in (job(), job(training=training))
    )
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reshard"),
    [
        (Layout(), False),
        (Layout(dp_shard=3), False),
        (Layout(dp_shard=3), True),
        (Layout(tp=2), False),
        (Layout(pp=2, dp_shard=2), False),
        (Layout(pp=2, dp_shard=2), True),
    ],
    ids=str,
)
def test_training_goes_on_as_if_nothing_had_been(layout: Layout, reshard: bool) -> None:
    """Losses, norms and state are bitwise those of a run without evaluation."""
    parallel = {"reshard_after_forward": reshard}
    averages = {"ema_decay": 0.9}
    with_, state = train(job(parallel=parallel, training=averages), layout)
    without, expected = train(job({}, parallel=parallel, training=averages), layout)
    assert [(step.loss, step.grad_norm) for step in with_] == [(step.loss, step.grad_norm) for step in without]
    assert all(step.eval_loss is None and step.eval_loss_ema is None for step in without)
    for key, value in expected.items():
        np.testing.assert_array_equal(state[key], value, err_msg=key)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2)], ids=str)
def test_the_averaged_weights_are_evaluated_too(layout: Layout) -> None:
    """The average becomes the weights of another run, whose step is too small to move them."""
    metrics, state = train(job(training={"ema_decay": 0.9}), layout)
    averaged = {key.replace("ema.", "param."): value for key, value in state.items() if key.startswith("ema.")}
    (losses,) = run_ranks(evaluate_at, 1, job(), Layout(), state | averaged)
    assert metrics[-1].eval_loss_ema == pytest.approx(losses[0], rel=1e-6)
    assert metrics[-1].eval_loss_ema != pytest.approx(metrics[-1].eval_loss, rel=1e-4)


def test_bf16_evaluates_to_the_same_within_its_rounding() -> None:
    made = job(training={"precision": "bf16"})
    one, two = (evaluations(train(made, layout)[0]) for layout in (Layout(), Layout(dp_shard=2)))
    np.testing.assert_allclose(two, one, rtol=2e-3)


def test_an_engine_without_its_samples_is_refused() -> None:
    with pytest.raises(RankError, match=r"evaluation\.uri=memory: its samples were not given"):
        run(job(), Layout(), 1)


def test_rounds_have_as_many_micro_batches_on_every_rank() -> None:
    """Seven samples in slots of two over three ranks: two, one and one slots, in rounds of one."""
    samples = evaluation_of(job())
    shares = [list(rounds(samples, rank, 3, most=1)) for rank in range(3)]
    assert [[len(loaded) for loaded in share] for share in shares] == [[1, 1]] * 3
    first = [share[turn][0][0][row][0] for share in shares for turn in range(2) for row in range(2)]
    expected = [NumberedSamples(job()).sample(index).input_ids[0] for index in range(7)]
    # Rank 0: samples 0 to 3; rank 1: 4 and 5; rank 2: 6, and a row of padding.
    assert first == [*expected[:4], *expected[4:6], 0, 0, expected[6], 0, 0, 0]
    assert (shares[2][0][0][1][1] == -100).all() and (shares[1][1][0][1] == -100).all()


def evaluations(metrics: list[StepMetrics]) -> list[float]:
    return [step.eval_loss for step in metrics if step.eval_loss is not None]
