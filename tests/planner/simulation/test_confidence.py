from __future__ import annotations

import random
import statistics

import pytest

from elastic_train.planner.simulation.confidence import Runs, estimate, student_t
from elastic_train.planner.simulation.events import simulate
from elastic_train.planner.simulation.failures import Failures
from tests.planner.simulation.scenarios import scenario


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (19, 2.0930), (1000, 1.9623)]
)
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=0.008)


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    chance, hits = random.Random(1), 0
    for _ in range(2000):
        found = estimate([chance.gauss(5.0, 2.0) for _ in range(8)])
        assert found.margin is not None
        hits += abs(found.mean - 5.0) <= found.margin
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)  # three standard deviations


def test_percentiles_and_a_single_run() -> None:
    found = estimate([float(number) for number in range(21)])
    assert (found.mean, found.low, found.high) == (10.0, 1.0, 19.0)
    assert found.margin == pytest.approx(2.086 * statistics.stdev(range(21)) / 21**0.5, rel=1e-3)
    assert estimate([3.0]).as_dict() == {"mean": 3.0, "margin": None, "p5": 3.0, "p95": 3.0}


def test_variants_meet_the_failures_that_each_would_meet_alone() -> None:
    few = scenario(failures=Failures(mtbf=500.0))
    many = scenario(failures=few.failures, spares=3)
    runs = Runs(few, seed=5, count=2, spares=3)
    assert runs.outcomes() == [simulate(few, 5), simulate(few, 6)]
    assert runs.outcomes(many) == [simulate(many, 5), simulate(many, 6)]
    assert runs.outcomes()[0].failures < runs.outcomes(many)[0].failures
