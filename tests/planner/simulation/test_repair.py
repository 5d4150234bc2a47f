from __future__ import annotations

import math
import statistics

import pytest

from elastic_train.config.faults import Fault, Kind
from elastic_train.planner.simulation.events import replay, simulate
from elastic_train.planner.simulation.failures import Failures, UnknownFailures, placed, traced
from elastic_train.planner.simulation.repair import Repair, Shape
from tests.planner.simulation.scenarios import failure, scenario

DRAWN = (Repair(7200.0, Shape.EXPONENTIAL), Repair(7200.0, Shape.LOGNORMAL, 1.0))


@pytest.mark.parametrize("repair", DRAWN, ids=lambda repair: repair.shape.value)
def test_the_mean_is_the_one_that_was_asked_for(repair: Repair) -> None:
    parts = [(number + 0.5) / 200_000 for number in range(200_000)]
    assert statistics.fmean(map(repair.seconds, parts)) == pytest.approx(7200.0, rel=0.005)
    assert repair.seconds(0.0) >= 0


def test_the_median_is_that_of_the_distribution() -> None:
    exponential, lognormal = DRAWN
    assert exponential.seconds(0.5) == pytest.approx(7200 * math.log(2))
    assert lognormal.seconds(0.5) == pytest.approx(7200 * math.exp(-0.5))
    normal = statistics.NormalDist().cdf(1.0)
    assert lognormal.seconds(normal) / lognormal.seconds(0.5) == pytest.approx(math.e)
    assert Repair(60.0).seconds(0.0) == Repair(60.0).seconds(0.99) == 60.0


def test_failures_are_the_same_whatever_repairs_take_and_repairs_have_that_mean() -> None:
    """1 host in 100 nodes fails at a time: what is missing of all host-seconds is repairs and starts."""
    failing = scenario(nodes=100, duration=2e6, failures=Failures(mtbf=1e6), newcomer=0.0, host_return=0.0)
    drawn = failing.failures.draw(100, 2e6, 1)
    away = [each for each in drawn if each.repair]
    assert len({each.part for each in away}) == len(away) > 100
    for repair in (Repair(1000.0), Repair(1000.0, Shape.EXPONENTIAL), Repair(1000.0, Shape.LOGNORMAL, 1.0)):
        outcome = simulate(scenario(**{**_fields(failing), "repair": repair}))
        missing = (200 * 2e6 - outcome.host_seconds) / 2
        assert missing / len(away) == pytest.approx(1000.0, rel=0.2)


def _fields(failing: object) -> dict[str, object]:
    return {name: getattr(failing, name) for name in ("nodes", "duration", "failures", "newcomer", "host_return")}


def test_a_trace_strikes_the_same_node_again_and_says_how_long_it_is_away() -> None:
    faults = [
        Fault(100.0, Kind.KILL_TRAINER, 0.1, 0.0, node="gpu-17", away=50.0),
        Fault(120.0, Kind.KILL_NODE, 0.1, 0.0, node="gpu-17"),  # it is not there: nothing happens
        Fault(300.0, Kind.KILL_NODE, 0.9, 0.0, node="gpu-17", away=200.0),
        Fault(700.0, Kind.KILL_NODE, 0.9, 0.0, node="gpu-03"),
    ]
    places = placed(faults, nodes=4, spares=0, seed=1)
    assert len(set(places.values())) == 2
    struck = traced(faults, places)
    assert [each.node for each in struck] == [places[fault.node] for fault in faults if fault.node]
    outcome = replay(scenario(), struck)
    # of 2 hosts each: 50 s and 200 s as the trace says, 100 s of the last one as the scenario has it
    assert outcome.host_seconds == pytest.approx(8 * 1000 - 2 * (50 + 200 + 100))
    assert outcome.interruptions == 3


def test_neighbours_of_a_trace_that_fail_at_once_lose_the_state_only_if_they_have_each_others_copies() -> None:
    def at_once(first: int, second: int) -> int:
        faults = [Fault(590.0, Kind.KILL_NODE, 0.0, 0.0, node=name) for name in "ab"]
        return replay(scenario(), traced(faults, {"a": first, "b": second})).from_storage

    assert (at_once(0, 1), at_once(0, 2)) == (1, 0)


def test_names_get_places_of_the_job_first_and_of_spares_when_they_are_many() -> None:
    faults = [Fault(1.0, Kind.KILL_NODE, 0.0, 0.0, node=f"n{number}") for number in range(5)]
    for seed in range(20):
        assert set(placed(faults[:3], nodes=4, spares=2, seed=seed).values()) <= {0, 1, 2, 3}
    assert placed(faults, 4, 2, 1) == placed(faults[::-1], 4, 2, 1) != placed(faults, 4, 2, 2)
    with pytest.raises(UnknownFailures, match="nodes=4: the trace names 5 nodes, so give at least 5"):
        placed(faults, 4, 0, 1)


def test_a_lost_node_that_no_repair_brings_back() -> None:
    outcome = replay(scenario(repair=Repair(math.inf)), [failure(500.0, Kind.KILL_NODE)])
    assert outcome.host_seconds == pytest.approx(8 * 1000 - 2 * 500)
