"""Many runs of one scenario, and how sure their mean is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_train.planner.simulation.events import replay
from elastic_train.planner.simulation.failures import Failure
from elastic_train.planner.simulation.scenario import Outcome, Scenario

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one figure over the runs.

    Attributes:
        margin: half the width of the 95 % confidence interval of the mean (Student's t); None of a single run.
        low, high: the runs' 5th and 95th percentiles, between which a single run is to be expected.
    """

    mean: float
    margin: float | None
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "margin": self.margin, "p5": self.low, "p95": self.high}


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value."""
    mean, ordered = statistics.fmean(values), sorted(values)
    margin = None
    if len(values) > 1:
        margin = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, margin, _percentile(ordered, 0.05), _percentile(ordered, 0.95))


def student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t: exact for 1 and 2 degrees of freedom, to 0.8 % from 3 on.

    Expansion around the normal quantile: Abramowitz and Stegun, 26.7.5.
    """
    upper = (1 + LEVEL) / 2
    if freedom == 1:
        return math.tan(math.pi * (upper - 0.5))
    if freedom == 2:
        return (2 * upper - 1) * math.sqrt(2 / (4 * upper * (1 - upper)))
    z = statistics.NormalDist().inv_cdf(upper)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Runs:
    """The same scenario with the failures of several seeds, which are drawn once: variants meet the same ones.

    Args:
        spares: the most that a variant has.
    """

    def __init__(self, scenario: Scenario, seed: int, count: int, spares: int = 0) -> None:
        self._scenario = scenario
        places = scenario.nodes + max(spares, scenario.spares)
        draw = scenario.failures.draw
        self._drawn = [draw(places, scenario.duration, each) for each in range(seed, seed + count)]

    def outcomes(self, scenario: Scenario | None = None, *, history: bool = False) -> list[Outcome]:
        """Of every seed; ``scenario``: a variant on as many places or fewer. ``history``: in the first one."""
        scenario = scenario or self._scenario
        return [
            replay(scenario, _on(scenario.places, failures), history=history and not run)
            for run, failures in enumerate(self._drawn)
        ]


def _on(places: int, failures: Sequence[Failure]) -> list[Failure]:
    return [failure for failure in failures if failure.node is None or failure.node < places]


def figures(outcomes: Iterable[Outcome], pick: Callable[[Outcome], float]) -> Estimate:
    """The estimate of one figure."""
    return estimate([pick(outcome) for outcome in outcomes])
