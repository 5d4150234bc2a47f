from __future__ import annotations

import pytest

from elastic_train.config.job import OptimizerConfig, ScheduleConfig
from elastic_train.training.schedule import learning_rate


def rate(step: int, warmup: int) -> float:
    optimizer, schedule = OptimizerConfig(learning_rate=1e-3), ScheduleConfig(warmup_steps=warmup, min_lr=1e-4)
    return learning_rate(step, optimizer=optimizer, schedule=schedule, steps=100)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 1e-4), (5, 5e-4), (10, 1e-3), (51, 6.12628e-4), (55, 5.5e-4), (100, 1e-4), (120, 1e-4)],
)
def test_warmup_then_cosine(step: int, expected: float) -> None:
    assert rate(step, warmup=10) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("step", "expected"), [(25, 8.68198e-4), (50, 5.5e-4), (75, 2.31802e-4), (90, 1.22025e-4), (100, 1e-4)]
)
def test_cosine_without_warmup_ends_at_the_minimum(step: int, expected: float) -> None:
    assert rate(step, warmup=0) == pytest.approx(expected, abs=1e-9)


def test_warmup_as_long_as_the_run_ends_at_the_peak() -> None:
    assert rate(100, warmup=100) == pytest.approx(1e-3)
