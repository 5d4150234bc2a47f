"""The simulator against what is known: Llama 3's 54 days, and a chaos run of this engine."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import asked_of
from elastic_train.config.faults import Kind, read_trace
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.costs import MEASURED, Pause
from elastic_train.planner.simulation.events import simulate
from elastic_train.planner.simulation.measured import Measured, measured
from elastic_train.planner.simulation.scenario import Outcome

HERE = Path(__file__).parent
SOAK: dict[str, Any] = json.loads((HERE / "soak.json").read_text())


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


def soak() -> Measured:
    """As ``soak.json`` tells it: seconds from a failure to the next finished step, with a whole step in them."""
    step = SOAK["step"]

    def pause(name: str, shape: Pause) -> Pause:
        return shape.scaled(SOAK["recovery"][name] - step)

    return Measured(
        **{name: SOAK[name] for name in ("nodes", "hosts_per_node", "duration", "start", "finish", "step")},
        **{name: SOAK[name] for name in ("newcomer", "host_return", "replace", "goodput", "seconds")},
        save_every=100 * step,
        beside={Cause.DATA_WAIT: SOAK["seconds"]["data_wait"] / SOAK["seconds"]["useful"]},
        pauses={kind: pause(kind, MEASURED[kind]) for kind in MEASURED if kind != Kind.PARTITION},
        growth=pause("growth", MEASURED[Kind.DRAIN]),
        faults=tuple(read_trace(HERE / "soak.jsonl", seed=1, seconds=10.0)),
        used={int(hosts): (used, speed) for hosts, (used, speed) in SOAK["used"].items()},
    )


def test_a_ten_minute_chaos_run_of_this_engine() -> None:
    """57 failures in 570 s; the simulator meets the measured goodput to 5 points, and the largest causes, too."""
    seen = soak()
    outcome = simulate(seen.scenario())
    assert 100 * outcome.goodput == pytest.approx(100 * seen.goodput, abs=5)
    assert outcome.host_seconds == pytest.approx(sum(seen.seconds.values()), rel=0.1)
    shares = {cause: 100 * seconds / outcome.host_seconds for cause, seconds in outcome.seconds.items()}
    total = sum(seen.seconds.values())
    for cause in Cause:
        assert shares.get(cause, 0.0) == pytest.approx(100 * seen.seconds.get(cause, 0.0) / total, abs=5), cause


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
