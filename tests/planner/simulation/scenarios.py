"""Small scenarios of which the right answer is arithmetic."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from elastic_train.config.faults import Kind
from elastic_train.planner.simulation.costs import Costs, Pace, Pause, Saves, Tiers
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
