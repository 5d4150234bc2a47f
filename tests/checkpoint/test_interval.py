from __future__ import annotations

import math

import numpy as np
import pytest

from elastic_train.checkpoint.interval import (
    MTBF_PRIOR_SECONDS,
    Measured,
    SaveCost,
    daly,
    interval_steps,
    mean_time_between_failures,
    worth_a_change,
    young,
)


@pytest.mark.parametrize(
    ("cost", "mtbf", "first", "higher"),
    [
        # By hand: C / 2M = x; sqrt(2CM) and sqrt(2CM) (1 + sqrt(x)/3 + x/9) - C.
        (2.0, 100.0, 20.0, 20.0 * (1 + 0.1 / 3 + 0.01 / 9) - 2.0),  # 18.68889
        (8.0, 400.0, 80.0, 74.75555555555556),
        (50.0, 100.0, 100.0, 100.0 * (1 + 0.5 / 3 + 0.25 / 9) - 50.0),  # 69.44444
        (300.0, 24 * 3600.0, 7200.0, 7200.0 * (1 + math.sqrt(300 / 172800) / 3 + 300 / 172800 / 9) - 300.0),
    ],
)
def test_the_formulas(cost: float, mtbf: float, first: float, higher: float) -> None:
    assert young(cost, mtbf) == pytest.approx(first, rel=1e-12)
    assert daly(cost, mtbf) == pytest.approx(higher, rel=1e-12)


def test_a_save_that_costs_more_than_failures_take_is_made_once_per_failure() -> None:
    assert daly(200.0, 100.0) == 100.0
    assert daly(1000.0, 100.0) == 100.0
    assert daly(199.999, 100.0) == pytest.approx(88.9, abs=0.1)  # 200 (1 + 1/3 + 1/9) - 200
    assert daly(0.0, 100.0) == 0.0


def wasted(interval: float, cost: float, gaps: np.ndarray) -> float:
    """Share of the time that is no progress, over all ``gaps`` (seconds between failures): what was saved counts."""
    saved = np.floor(gaps / (interval + cost)) * interval
    return 1.0 - float(saved.sum() / gaps.sum())


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 1000.0), (5.0, 500.0), (30.0, 600.0), (60.0, 300.0)])
def test_the_best_interval_of_a_simulation_is_dalys(cost: float, mtbf: float) -> None:
    """400,000 failures at exponentially distributed times, and a save after each interval of work."""
    levels = (np.arange(400_000) + 0.5) / 400_000
    gaps = -mtbf * np.log1p(-levels)
    shares = np.linspace(0.5, 2.0, 151)
    waste = [wasted(daly(cost, mtbf) * share, cost, gaps) for share in shares]
    assert shares[int(np.argmin(waste))] == pytest.approx(1.0, abs=0.1)


def test_failures_make_it_shorter_and_their_absence_longer() -> None:
    assert mean_time_between_failures(60.0, 0) == MTBF_PRIOR_SECONDS
    assert mean_time_between_failures(10 * MTBF_PRIOR_SECONDS, 0) == 10 * MTBF_PRIOR_SECONDS
    assert mean_time_between_failures(3600.0, 3) == 1200.0


def test_the_cost_is_what_the_steps_take_longer_while_saving() -> None:
    cost = SaveCost()
    cost.step(9.0, True)
    cost.saved()
    assert not cost.known  # how long a step takes without a save is not known yet
    for seconds in (1.0, 1.1, 0.9, 50.0, 1.0):  # one of them was slow for a reason of its own
        cost.step(seconds, False)
    for during, expected in (((1.5, 1.5), 1.0), ((0.5,), 0.0), ((4.0,), 3.0), ((), 0.0)):
        for seconds in during:
            cost.step(seconds, True)
        before = list(cost._costs)
        cost.saved()
        assert cost._costs[-1] == pytest.approx(expected)
        assert len(cost._costs) == len(before) + 1
    assert cost.known
    assert cost.step_seconds == 1.0
    assert cost.seconds == pytest.approx(0.5)  # the median of 1, 0, 3, 0


def test_steps_between_two_saves() -> None:
    measured = Measured(cost=2.0, save_seconds=1.0, mtbf=100.0, step_seconds=0.5)
    assert interval_steps(measured, 1, 1000) == math.ceil(18.68889 / 0.5)
    assert interval_steps(measured, 50, 1000) == 50
    assert interval_steps(measured, 1, 20) == 20
    slow = Measured(cost=0.0, save_seconds=60.0, mtbf=100.0, step_seconds=0.5)
    assert interval_steps(slow, 1, 1000) == 120  # or the next one would fall due while it is going on
    assert interval_steps(slow, 1, 100) == 100


def test_only_a_change_of_more_than_a_fifth_is_made() -> None:
    assert [worth_a_change(100, better) for better in (79, 80, 100, 120, 121)] == [True, False, False, False, True]
