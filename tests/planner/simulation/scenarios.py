"""Small scenarios of which the right answer is arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_train.config.faults import Kind
from elastic_train.planner.simulation.costs import Costs, Pace, Pause, Saves
from elastic_train.planner.simulation.failures import Failure, Failures
from elastic_train.planner.simulation.repair import Repair
from elastic_train.planner.simulation.scenario import Scenario
from elastic_train.planner.simulation.throughput import proportional

PAUSE = Pause(detection=1.0, teardown=2.0, form=3.0, restore=4.0, first_step=5.0)
"""15 s"""


def scenario(**changes: Any) -> Scenario:
    """4 nodes of 2 hosts, steps of 10 s, 1000 s; every failure pauses 15 s, a lost node is back in 100 s + 20 s."""
    plain = Scenario(
        nodes=4,
        hosts_per_node=2,
        throughput=proportional(8),
        failures=Failures(),
        duration=1000.0,
        costs=Costs(dict.fromkeys(Kind, PAUSE), growth=PAUSE, per_host=0.0, load=7.0),
        saves=Saves(every=100.0, seconds=10.0),
        pace=Pace(10.0),
        repair=Repair(100.0),
        host_return=30.0,
        newcomer=20.0,
    )
    return replace(plain, **changes)


def failure(at: float, kind: Kind, node: int | None = 0, **more: Any) -> Failure:
    return Failure(at, kind, **{"pick": 0.0, "node": node, **more})
