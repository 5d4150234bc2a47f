from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_train.checkpoint.interval import daly, young
from elastic_train.config.faults import LLAMA3_FAILURES, Kind
from elastic_train.planner.simulation.best import best_interval, best_spares, lowest
from elastic_train.planner.simulation.confidence import Runs
from elastic_train.planner.simulation.costs import Costs, Pace, Pause, Saves, Tiers
from elastic_train.planner.simulation.failures import Failure, Failures
from elastic_train.planner.simulation.scenario import Scenario
from elastic_train.planner.simulation.throughput import proportional

MTBF = 10_000.0


def classic(stall: float, failures: int = 3000) -> Scenario:
    """Young's and Daly's setting: a machine that fails as a whole, saves that stop it, a restart without delay.

    The gaps between failures are exponential, one from each equal part of the distribution, in random order: their
    mean is exact, and what is left of chance is the phase in which a failure meets the interval.
    """
    gaps = [-MTBF * math.log((number + 0.5) / failures) for number in range(failures)]
    random.Random(1).shuffle(gaps)
    times, at = [], 0.0
    for gap in gaps:
        at += gap
        times.append(at)
    trace = tuple(Failure(at, Kind.KILL_TRAINER, 0.0, 0) for at in times)
    return Scenario(
        nodes=1,
        hosts_per_node=1,
        throughput=proportional(1),
        failures=Failures(trace=trace),
        duration=at,
        costs=Costs({Kind.KILL_TRAINER: Pause()}, per_host=0.0),
        saves=Saves(stall=stall, seconds=stall),
        tiers=Tiers(memory=False),
        pace=Pace(0.05),
    )


@pytest.mark.parametrize(
    ("stall", "formulas"),
    [
        (1.0, (young, daly)),  # they differ by 0.5 %
        (100.0, (daly,)),  # C is 1 % of M: Young's is 5 % too long
    ],
)
def test_the_best_interval_is_that_of_young_and_daly(stall: float, formulas: tuple[Callable[..., float], ...]) -> None:
    scenario = classic(stall)
    best = best_interval(Runs(scenario, 1, 1), scenario, around=young(stall, MTBF))
    for formula in formulas:
        assert best.value == pytest.approx(formula(stall, MTBF), rel=0.02)
    if young not in formulas:  # nor is it a search that ends where it begins
        assert best.value is not None and best.value < 0.97 * young(stall, MTBF)


def test_the_search_finds_the_region_by_itself() -> None:
    scenario = classic(20.0, failures=800)
    best = best_interval(Runs(scenario, 1, 1), scenario)
    assert best.value == pytest.approx(daly(20.0, MTBF), rel=0.02)


def test_the_lowest_point_of_a_curve_that_is_known() -> None:
    values = [50.0 * 1.5**number for number in range(9)]
    noise = random.Random(1)
    losses = [1 / value + value / 40_000 + noise.gauss(0, 2e-5) for value in values]
    assert lowest(values, losses) == pytest.approx(200.0, rel=0.02)
    assert lowest([1.0, 2.0], [3.0, 1.0]) == 2.0


def test_no_interval_is_better_where_nothing_goes_to_storage() -> None:
    scenario = replace(classic(0.0), tiers=Tiers(), nodes=2, failures=Failures(mtbf=5000.0), duration=50_000.0)
    assert best_interval(Runs(scenario, 1, 2), scenario).value is None


def spares_scenario(unit: int) -> Scenario:
    return Scenario(
        nodes=64,
        hosts_per_node=8,
        throughput=proportional(512, 64, unit * 8),
        failures=Failures(mtbf=500 * 3600.0, mix=tuple(LLAMA3_FAILURES.values())),
        duration=20 * 86400.0,
        replace=4 * 3600.0,
    )


def test_a_spare_pays_where_one_node_idles_a_whole_replica() -> None:
    wide, narrow = spares_scenario(16), spares_scenario(1)
    paid = best_spares(Runs(wide, 1, 3, 8), wide, 8)
    assert paid.value is not None and 1 <= paid.value <= 4
    assert [each.value for each in paid.candidates] == [0, 1, 2, 3, 4, 6, 8]
    assert best_spares(Runs(narrow, 1, 3, 8), narrow, 8).value == 0  # a spare idles as much as it saves, and more
