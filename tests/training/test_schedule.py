from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from elastic_train.config.errors import ConfigError
from elastic_train.config.layout import Layout
from elastic_train.config.load import parse_job
from elastic_train.config.optimizer import OptimizerConfig, ScheduleConfig
from elastic_train.training.schedule import learning_rate
from tests.config.job_files import GOOD
from tests.training.runs import run
from tests.training.synthetic import small_job


def rate(step: int, warmup: int, **schedule: Any) -> float:
    optimizer = OptimizerConfig(learning_rate=1e-3)
    made = ScheduleConfig(**({"warmup_steps": warmup, "min_lr": 1e-4} | schedule))
    return learning_rate(step, optimizer=optimizer, schedule=made, steps=100)


@pytest.mark.parametrize(  # OP-01, OP-07
    ("step", "expected"),
    [(1, 1e-4), (5, 5e-4), (10, 1e-3), (51, 6.126278e-4), (55, 5.5e-4), (100, 1e-4), (120, 1e-4)],
)
def test_warmup_then_cosine(step: int, expected: float) -> None:
    assert rate(step, warmup=10) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(  # OP-03
    ("step", "expected"), [(25, 8.68198e-4), (50, 5.5e-4), (75, 2.31802e-4), (90, 1.22025e-4), (100, 1e-4)]
)
def test_cosine_without_warmup_ends_at_the_minimum(step: int, expected: float) -> None:
    assert rate(step, warmup=0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("step", "expected"), [(5, 5e-4), (10, 1e-3), (55, 5.5e-4), (82, 2.8e-4), (100, 1e-4)])
def test_linear(step: int, expected: float) -> None:
    """From (10, 1e-3) to (100, 1e-4): 1e-5 a step."""
    assert rate(step, warmup=10, name="linear") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("step", "expected"), [(1, 1e-4), (10, 1e-3), (11, 1e-3), (100, 1e-3), (200, 1e-3)])
def test_constant(step: int, expected: float) -> None:
    assert rate(step, warmup=10, name="constant", min_lr=0.0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("decay_steps", "step", "expected"),
    [
        (20, 5, 5e-4),
        (20, 10, 1e-3),
        (20, 80, 1e-3),
        (20, 81, 9.55e-4),
        (20, 90, 5.5e-4),
        (20, 100, 1e-4),
        (None, 90, 1e-3),  # a tenth of 100 steps
        (None, 95, 5.5e-4),
        (0, 100, 1e-3),
    ],
)
def test_warmup_stable_decay(decay_steps: int | None, step: int, expected: float) -> None:
    """arXiv:2404.06395."""
    assert rate(step, warmup=10, name="wsd", decay_steps=decay_steps) == pytest.approx(expected, abs=1e-9)


def test_warmup_as_long_as_the_run_ends_at_the_peak() -> None:
    for name in ("cosine", "linear", "wsd"):
        assert rate(100, warmup=100, name=name) == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_one_rate_per_update_whatever_the_layout_and_the_resumption(name: str) -> None:  # OP-01, OP-07, OP-09
    """Four slots a rank and then two; steps 1-2 on one rank, 3-4 on two: the rates of one uninterrupted run."""
    schedule = {"name": name, "warmup_steps": 2} | ({"min_lr": 0.0} if name == "constant" else {"min_lr": 1e-4})
    job = small_job(model={"num_hidden_layers": 1}, training={"steps": 8, "global_batch": 4}, schedule=schedule)
    first = run(job, Layout(), 2)
    rest = run(job, Layout(dp_shard=2), 4, first=3, state=first.after)
    expected = [learning_rate(step, optimizer=job.optimizer, schedule=job.schedule, steps=8) for step in range(1, 5)]
    assert [step.lr for step in first.metrics + rest.metrics] == expected


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"decay_steps": 5}, "decay_steps=5 is for name=wsd; with name=cosine leave it out"),
        ({"name": "constant", "min_lr": 1e-5}, "min_lr=1e-05 is not reached with name=constant"),
    ],
)
def test_settings_of_another_schedule_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ScheduleConfig(**settings)


def test_a_decay_that_does_not_fit_behind_the_warmup() -> None:
    overrides = ["schedule.name=wsd", "schedule.warmup_steps=90", "schedule.decay_steps=20"]
    with pytest.raises(ConfigError) as error:
        parse_job(GOOD, overrides)
    assert list(error.value.problems) == [
        "schedule.decay_steps=20: must be at most training.steps - schedule.warmup_steps = 100 - 90 = 10"
    ]
