"""The simulator against what is known: Llama 3's 54 days, a chaos run of this engine, what its benchmarks measured."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import asked_of
from elastic_train.config.faults import Kind
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.costs import MEASURED
from elastic_train.planner.simulation.events import simulate
from elastic_train.planner.simulation.measured import measured
from elastic_train.planner.simulation.scenario import Outcome
from elastic_train.planner.simulation.storage import READ_PER_HOST, WRITE_PER_HOST

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RECOVERING = (Cause.DETECTION, Cause.TEARDOWN, Cause.FORM, Cause.RESTORE, Cause.FIRST_STEP)


@pytest.mark.slow
def test_llama_3() -> None:
    """More than 90 % effective training time is what Meta reports (arXiv:2407.21783, section 3.3.4)."""
    question = asked_of(Asked(like="llama3", runs=6))
    elastic, restart = (case.outcomes(False) for case in question.cases)

    def mean(outcomes: list[Outcome], name: str) -> float:
        return statistics.fmean(getattr(outcome, name) for outcome in outcomes)

    scenario = question.cases[0].scenario
    assert (scenario.nodes * scenario.hosts_per_node, scenario.duration) == (16_384, 54 * 86400.0)
    failures = mean(restart, "failures") * scenario.nodes / scenario.places
    assert failures == pytest.approx(419, abs=3 * (419 / 6) ** 0.5)
    assert 0.90 < mean(restart, "ettr") < 0.94
    assert 0.99 < mean(elastic, "ettr") < 0.999
    assert mean(elastic, "steps_lost") == 0
    assert mean(elastic, "events") < 5 * mean(elastic, "failures")  # not by steps, of which there are 466,000


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the rows below the heading line that begins with ``head``."""
    lines = (ROOT / "docs" / page).read_text().split(f"\n{head}", 1)[1].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines)]


def test_pauses_are_those_of_the_benchmark() -> None:
    """Medians; of a first step and of a wait for news what is beyond a usual step and the setting."""
    parts = {row[0]: [float(cell) for cell in row[1:]] for row in table("benchmarks.md", "| failure | detection")}
    steps = {
        row[0]: float(row[6]) for row in table("benchmarks.md", "| failure | median s | min | max | n | steps lost")
    }
    names = {
        "trainer": (Kind.KILL_TRAINER, "trainer killed", 0.0),
        "hang": (Kind.HANG, "the same", 1.0),
        "host": (Kind.KILL_HOST, "host killed", 0.0),
        "node": (Kind.KILL_NODE, "node killed", 0.0),
        "drain": (Kind.DRAIN, "node drained", 0.0),
        "partition": (Kind.PARTITION, "partition", 4.0),
    }
    assert set(parts) == set(names)
    for name, (kind, row, setting) in names.items():
        detection, teardown, form, restore, first = parts[name]
        known = (detection - setting, teardown, form, restore, max(first - steps[row], 0.0))
        assert [seconds for _, seconds in MEASURED[kind].parts()] == pytest.approx(known, abs=0.0051), name


def test_speeds_of_storage_are_those_of_the_benchmark() -> None:
    row = next(row for row in table("benchmarks.md", "| MB | ranks | save MB/s") if row[:2] == ["2000", "1"])
    assert (1e6 * float(row[2]), 1e6 * float(row[4])) == (WRITE_PER_HOST, READ_PER_HOST)


def test_a_ten_minute_chaos_run_of_this_engine() -> None:
    """``benchmarks.soak``: 61 faults of chaos in 584 s. From its logs comes its goodput to 5 points, and each cause."""
    ledger, steps = logs("soak/ledger.jsonl"), logs("soak/steps.jsonl")
    seen = measured(ledger, steps)
    assert (len(seen.faults), seen.goodput) == (64, pytest.approx(0.7505, abs=1e-4))
    assert seen.duration == pytest.approx(584.0, abs=0.5)
    outcomes = [simulate(measured(ledger, steps, seed).scenario()) for seed in range(1, 21)]
    for outcome in outcomes:
        assert 100 * outcome.goodput == pytest.approx(100 * seen.goodput, abs=5)
        assert outcome.host_seconds == pytest.approx(sum(seen.seconds.values()), rel=0.1)
    total = sum(seen.seconds.values())
    measured_shares = {cause: 100 * seconds / total for cause, seconds in seen.seconds.items()}
    shares = {
        cause: statistics.fmean(100 * run.seconds.get(cause, 0.0) / run.host_seconds for run in outcomes)
        for cause in Cause
    }
    for cause in Cause:
        assert shares.get(cause, 0.0) == pytest.approx(measured_shares.get(cause, 0.0), abs=5), cause
    page = (ROOT / "docs" / "simulator.md").read_text()
    for name, found in (("ledger", measured_shares), ("simulated", shares)):
        columns = (
            found[Cause.USEFUL],
            found[Cause.START],
            found[Cause.REPLAYED],
            found[Cause.LOST_STEP],
            sum(found[cause] for cause in RECOVERING),
            found[Cause.IDLE_SPARE],
            found[Cause.WAITING],
        )
        assert f"| {name} | {' | '.join(f'{share:.1f}' for share in columns)} |" in page


def test_nodes_of_a_run_have_the_places_of_those_they_replaced() -> None:
    """Nine nodes came and went on two places: a fault strikes the node that it struck."""
    seen = measured(logs("soak/ledger.jsonl"), logs("soak/steps.jsonl"))
    assert len(seen.places) == 9 and set(seen.places.values()) == {0, 1}
    assert {fault.node for fault in seen.faults if fault.node} <= set(seen.places)
    assert seen.replace == pytest.approx(
        14.7, abs=0.1
    )  # to another node's first host, from the notice on if there was one
    assert seen.host_return == pytest.approx(3.5, abs=0.1)  # a killed host's, on the same node


def logs(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def test_a_run_again_from_its_logs() -> None:
    """A real job of 4 hosts whose node was killed with SIGKILL and replaced; it stood still for 20 s then."""
    seen = measured(logs("ledger.jsonl"), logs("steps.jsonl"))
    assert (seen.nodes, seen.hosts_per_node) == (2, 2)
    assert [fault.kind for fault in seen.faults] == [Kind.KILL_NODE]
    assert seen.replace == seen.host_return == pytest.approx(2.77, abs=0.01)
    assert seen.pauses[Kind.KILL_NODE].form == pytest.approx(0.177, abs=0.001)
    assert seen.used[2][0] == 2 and seen.used[4] == (4, 1.0)
    outcome = simulate(seen.scenario())
    for cause in (Cause.START, Cause.TEARDOWN, Cause.FORM, Cause.RESTORE, Cause.FIRST_STEP, Cause.FINISHING):
        assert outcome.seconds[cause] == pytest.approx(seen.seconds[cause], abs=0.1), cause


def test_a_node_that_none_came_for_stays_away() -> None:
    ledger = logs("ledger.jsonl")
    formed = next(line["time"] for line in ledger if line["event"] == "generation_formed")
    alone = [line for line in ledger if line["event"] != "host_joined" or line["time"] <= formed]
    seen = measured(alone, logs("steps.jsonl"))
    assert seen.replace == seen.host_return == math.inf
    outcome, (fault,) = simulate(seen.scenario()), seen.faults
    there = 4 * seen.duration - 2 * (seen.duration - fault.at)
    assert outcome.host_seconds == pytest.approx(there + 2 * seen.finish)
