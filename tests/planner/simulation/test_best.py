from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic_train.checkpoint.interval import daly, young
from elastic_train.config.faults import LLAMA3_FAILURES, Interruption, Kind
from elastic_train.planner.simulation.best import Best, best_interval, best_spares, lowest, time_between_falls
from elastic_train.planner.simulation.confidence import Runs
from elastic_train.planner.simulation.costs import Costs, Pace, Pause, Tiers
from elastic_train.planner.simulation.failures import Failures
from elastic_train.planner.simulation.repair import Repair
from elastic_train.planner.simulation.scenario import Scenario
from elastic_train.planner.simulation.throughput import proportional
from tests.planner.simulation.scenarios import MTBF, classic


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


def test_pauses_and_waits_are_no_time_in_which_work_is_at_risk() -> None:
    """Of the same failures, each with a pause of half their mean distance: the best interval stays as it was."""
    plain, pause = classic(20.0, 800), MTBF / 2
    trace = tuple(replace(each, at=each.at + number * pause) for number, each in enumerate(plain.failures.trace or ()))
    paused = replace(
        plain,
        failures=Failures(trace=trace),
        duration=plain.duration + len(trace) * pause,
        costs=Costs({Kind.KILL_TRAINER: Pause(detection=pause)}, per_host=0.0),
    )
    runs = Runs(paused, 1, 1)
    mtbf = time_between_falls(runs.outcomes())
    assert mtbf == pytest.approx(MTBF, rel=0.005)
    assert best_interval(runs, paused).value == pytest.approx(daly(20.0, mtbf), rel=0.02)


def test_the_best_interval_is_one_of_whole_steps_and_says_how_sure_it_is() -> None:
    """Steps of 40 s, saves of 20 s, a failure of the one host in 10,000 s: 619 s by Daly, so 15 or 16 steps."""
    coarse = replace(
        classic(20.0, 1),
        failures=Failures(mtbf=MTBF, mix=(Interruption(1, Kind.KILL_TRAINER),)),
        duration=100 * MTBF,
        pace=Pace(40.0),
    )
    best = best_interval(Runs(coarse, 1, 20), coarse)
    assert all(each.value % 40.0 == 0 for each in best.candidates)
    assert len({each.value for each in best.candidates}) == len(best.candidates)
    assert best.value in (560.0, 600.0, 640.0, 680.0)
    assert best.sure is not None and 0.9 * 619 < best.sure[0] <= best.value <= best.sure[1] < 1.2 * 619
    # x off the best x0 costs (x0 / x + x / x0 - 2) sqrt(C / 2M): 0.001 for x / x0 = 1.2 and 1 / 1.2
    assert best.flat == (pytest.approx(619 / 1.2, rel=0.08), pytest.approx(619 * 1.2, rel=0.08))
    assert best_interval(Runs(coarse, 1, 2), coarse).sure is None


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
    failures = Failures(mtbf=5000.0, mix=(Interruption(1, Kind.KILL_TRAINER),))
    scenario = replace(classic(0.0), tiers=Tiers(), failures=failures, duration=50_000.0)
    assert Runs(scenario, 1, 2).outcomes()[0].interruptions > 0
    assert best_interval(Runs(scenario, 1, 2), scenario).value is None


def test_without_a_fall_there_is_no_best_interval() -> None:
    calm = replace(classic(20.0, 1), failures=Failures(), duration=86400.0)
    assert best_interval(Runs(calm, 1, 3), calm) == Best(None, [])


def test_the_range_of_spares_grows_until_more_are_worse() -> None:
    """A job that needs all 16 nodes: a lost node is away for 10 of 20 days in the mean, so 8 spares are too few."""
    rigid = replace(
        spares_scenario(1),
        nodes=16,
        throughput=proportional(128, 128),
        failures=Failures(mtbf=10 * 86400.0, mix=(Interruption(1, Kind.KILL_NODE),)),
        repair=Repair(10 * 86400.0),
        duration=100 * 86400.0,
    )
    found = best_spares(rigid, 1, 2, 8)
    values = [each.value for each in found.candidates]
    assert found.value is not None and 12 <= found.value <= 16
    assert {found.value - 1, found.value} <= set(values) and max(values) == 16.0
    assert found.sure is not None and found.sure[0] <= found.value <= found.sure[1]


def spares_scenario(unit: int) -> Scenario:
    return Scenario(
        nodes=64,
        hosts_per_node=8,
        throughput=proportional(512, 64, unit * 8),
        failures=Failures(mtbf=500 * 3600.0, mix=tuple(LLAMA3_FAILURES.values())),
        duration=20 * 86400.0,
        repair=Repair(4 * 3600.0),
    )


def test_a_spare_pays_where_one_node_idles_a_whole_replica() -> None:
    wide, narrow = spares_scenario(16), spares_scenario(1)
    paid = best_spares(wide, 1, 3, 8)
    assert paid.value is not None and 1 <= paid.value <= 4
    assert {0, 1, 2, 3, 4, 6, 8} <= {each.value for each in paid.candidates} <= set(range(9))
    assert best_spares(narrow, 1, 3, 8).value == 0  # a spare idles as much as it saves, and more
