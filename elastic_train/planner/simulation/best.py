"""The best interval between checkpoints and the best number of spares, found by simulating.

All candidates meet the same failures. Near its optimum the loss is flat and what is left of chance would decide, so
a smooth curve is laid through the candidates' losses and its minimum is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_train.planner.simulation.confidence import Estimate, Runs, estimate
from elastic_train.planner.simulation.scenario import Outcome, Scenario

_FIRST = 9
"""candidates over the whole range, then as many around the best of them"""
_WIDTH = 2.5
"""the second time from so many times shorter to so many times longer"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """``value``: seconds between checkpoints, or spares. ``loss``: what is minimised."""

    value: float
    loss: Estimate
    goodput: Estimate


@dataclass(frozen=True, slots=True)
class Best:
    """``value``: where the curve through the candidates is lowest; None: saves cost nothing and none was needed."""

    value: float | None
    candidates: Sequence[Candidate]


def best_interval(runs: Runs, scenario: Scenario, around: float | None = None) -> Best:
    """Seconds of work between two checkpoints with the highest progress.

    Args:
        around: where to look, seconds; default: everywhere from a save's own duration to half the run.
    """
    if not scenario.saves.stall and not any(outcome.from_storage for outcome in runs.outcomes(scenario)):
        return Best(None, [])
    least = shortest(scenario)
    if around is None:
        everywhere = _try_intervals(runs, scenario, _geometric(least, max(scenario.duration / 2, least)))
        around = min(everywhere, key=lambda each: each.loss.mean).value
    near = _geometric(max(around / _WIDTH, least), min(around * _WIDTH, scenario.duration))
    fine = _try_intervals(runs, scenario, near)
    return Best(lowest([each.value for each in fine], [each.loss.mean for each in fine]), fine)


def shortest(scenario: Scenario) -> float:
    """Seconds: a save must be over, and a step finished, before the next one."""
    return max(scenario.pace.step, scenario.saves.seconds)


def _try_intervals(runs: Runs, scenario: Scenario, intervals: Sequence[float]) -> list[Candidate]:
    found = []
    for seconds in intervals:
        variant = replace(scenario, saves=replace(scenario.saves, every=seconds))
        found.append(_candidate(seconds, runs.outcomes(variant), lambda outcome: 1 - outcome.progress))
    return found


def best_spares(runs: Runs, scenario: Scenario, most: int) -> Best:
    """Spare nodes with which a finished step costs the fewest host-seconds.

    ``loss`` is host-seconds per step over those of a step of the full job: 1 without failures and spares.
    """
    full = scenario.nodes * scenario.hosts_per_node * scenario.pace.step

    def price(outcome: Outcome) -> float:
        return outcome.host_seconds / (max(outcome.steps, 1) * full)

    candidates = []
    for spares in _numbers(most):
        variant = replace(scenario, spares=spares)
        candidates.append(_candidate(float(spares), runs.outcomes(variant), price))
    return Best(min(candidates, key=lambda each: each.loss.mean).value, candidates)


def _numbers(most: int) -> list[int]:
    """0 to ``most``, with gaps that grow: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    found = [0, 1]
    while found[-1] < most:
        power = 2 ** (found[-1].bit_length() - 1)
        found.append(min(found[-1] + max(power // 2, 1), most))
    return found[: most + 1]


def _candidate(value: float, outcomes: Sequence[Outcome], loss: Callable[[Outcome], float]) -> Candidate:
    return Candidate(
        value, estimate([loss(each) for each in outcomes]), estimate([outcome.goodput for outcome in outcomes])
    )


def _geometric(low: float, high: float) -> list[float]:
    if high <= low:
        return [low]
    return [low * (high / low) ** (number / (_FIRST - 1)) for number in range(_FIRST)]


def lowest(values: Sequence[float], losses: Sequence[float]) -> float:
    """Where ``a + b / x + c x + d x**2``, fitted to the losses by least squares, is lowest between the values.

    The terms are those of the loss itself: saves, lost work, and lost work to a higher order (Young 1974, Daly 2006).
    """
    import numpy as np

    middle = math.sqrt(values[0] * values[-1])
    x = np.asarray(values) / middle
    terms = np.stack([np.ones_like(x), 1 / x, x, x**2], axis=1)
    if len(x) < terms.shape[1]:
        return values[min(range(len(values)), key=lambda number: losses[number])]
    a, b, c, d = np.linalg.lstsq(terms, np.asarray(losses), rcond=None)[0]
    fine = np.geomspace(x[0], x[-1], 4001)
    return float(fine[np.argmin(a + b / fine + c * fine + d * fine**2)] * middle)
