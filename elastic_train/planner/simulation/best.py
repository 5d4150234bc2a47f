"""The best interval between checkpoints and the best number of spares, found by simulating.

All candidates meet the same failures. Near its optimum the loss is flat and what is left of chance would decide, so
a smooth curve is laid through the candidates' losses and its minimum is taken. What chance leaves open is said with
it: the curve is laid again through resamples of the runs, and numbers of spares are compared run by run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic_train.planner.simulation.confidence import Estimate, Runs, estimate
from elastic_train.planner.simulation.scenario import Outcome, Scenario

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FIRST = 9
"""candidates over the whole range, then as many around the best of them"""
_WIDTH = 2.5
"""the second time from so many times shorter to so many times longer"""
_RESAMPLES = 200
FLAT = 0.001
"""a loss that is larger by less than this is as good"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """``value``: seconds between checkpoints, or spares. ``losses``: what is minimised, of each run."""

    value: float
    losses: Sequence[float]
    loss: Estimate
    goodput: Estimate


@dataclass(frozen=True, slots=True)
class Best:
    """``value``: where the curve through the candidates is lowest; None: no run says anything of it.

    Attributes:
        sure: what chance may have made of it, at 95 %: from the least to the most; None of too few runs.
        flat: from the least to the most that loses less than ``FLAT`` against ``value``; None when not looked for.
    """

    value: float | None
    candidates: Sequence[Candidate]
    sure: tuple[float, float] | None = None
    flat: tuple[float, float] | None = None


def time_between_falls(outcomes: Sequence[Outcome]) -> float | None:
    """Mean seconds of running until the work since the last checkpoint is lost; None: it never was.

    The M of Young and Daly: in a pause or a wait there is nothing to lose.
    """
    falls = sum(outcome.from_storage for outcome in outcomes)
    return sum(outcome.running for outcome in outcomes) / falls if falls else None


def best_interval(runs: Runs, scenario: Scenario, around: float | None = None) -> Best:
    """Seconds of work between two checkpoints, in whole steps, with the highest progress.

    None where nothing fell back to a checkpoint: then the fewer the better, which no number of runs can bound.

    Args:
        around: where to look, seconds; default: everywhere from a save's own duration to half the run.
    """
    if time_between_falls(runs.outcomes(scenario)) is None:
        return Best(None, [])
    least, step = shortest(scenario), scenario.pace.step
    if around is None:
        everywhere = _try_intervals(runs, scenario, _geometric(least, max(scenario.duration / 2, least)))
        around = min(everywhere, key=lambda each: each.loss.mean).value
    near = _geometric(max(around / _WIDTH, least), min(around * _WIDTH, scenario.duration))
    fine = _try_intervals(runs, scenario, near)
    values, losses = [each.value for each in fine], [each.loss.mean for each in fine]
    best = _whole(lowest(values, losses), step)
    return Best(best, fine, _resampled(fine, step), _flat(values, losses))


def _whole(seconds: float, step: float) -> float:
    return max(round(seconds / step), 1) * step


def shortest(scenario: Scenario) -> float:
    """Seconds, in whole steps: a save must be over, and a step finished, before the next one."""
    step = scenario.pace.step
    return max(math.ceil(scenario.saves.seconds / step - 1e-9), 1) * step


def _try_intervals(runs: Runs, scenario: Scenario, intervals: Sequence[float]) -> list[Candidate]:
    """Of the nearest whole numbers of steps."""
    step = scenario.pace.step
    found = []
    for steps in sorted({max(round(seconds / step), 1) for seconds in intervals}):
        variant = replace(scenario, saves=replace(scenario.saves, every=steps * step))
        found.append(_candidate(steps * step, runs.outcomes(variant), lambda outcome: 1 - outcome.progress))
    return found


def _resampled(candidates: Sequence[Candidate], step: float) -> tuple[float, float] | None:
    """The middle 95 % of the best values of as many runs drawn from these again and again (Efron's bootstrap)."""
    runs, chance = len(candidates[0].losses), random.Random(1)
    if runs < 3:
        return None
    values = [each.value for each in candidates]
    found = []
    for _ in range(_RESAMPLES):
        again = [chance.randrange(runs) for _ in range(runs)]
        found.append(lowest(values, [sum(each.losses[run] for run in again) / runs for each in candidates]))
    ordered, cut = sorted(found), _RESAMPLES // 40
    return _whole(ordered[cut], step), _whole(ordered[-1 - cut], step)


def _flat(values: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    fine, curve = smooth(values, losses)
    good = fine[curve < curve.min() + FLAT]
    return float(good[0]), float(good[-1])


def best_spares(scenario: Scenario, seed: int, count: int, most: int) -> Best:
    """Spare nodes with which a finished step costs the fewest host-seconds, in ``count`` runs from ``seed``.

    ``loss`` is host-seconds per step over those of a step of the full job: 1 without failures and spares.

    Args:
        most: where to look; twice as far while the last number is the best, up to as many spares as nodes.
    """
    limit, tried = max(most, scenario.nodes), dict[int, Candidate]()
    while True:
        _try_spares(scenario, seed, count, _numbers(most), tried)
        best = min(tried, key=lambda spares: tried[spares].loss.mean)
        if best < most or most >= limit:
            break
        most = min(2 * most, limit)
    while between := _between(sorted(tried), best):
        _try_spares(scenario, seed, count, between, tried)
        best = min(tried, key=lambda spares: tried[spares].loss.mean)
    candidates = [tried[spares] for spares in sorted(tried)]
    return Best(float(best), candidates, _as_good(candidates, tried[best]))


def _try_spares(scenario: Scenario, seed: int, count: int, numbers: Iterable[int], tried: dict[int, Candidate]) -> None:
    new = [spares for spares in numbers if spares not in tried]
    runs = Runs(scenario, seed, count, max(new))
    full = scenario.nodes * scenario.hosts_per_node * scenario.pace.step
    for spares in new:
        outcomes = runs.outcomes(replace(scenario, spares=spares))
        tried[spares] = _candidate(
            float(spares), outcomes, lambda outcome: outcome.host_seconds / (max(outcome.steps, 1) * full)
        )


def _between(tried: Sequence[int], best: int) -> list[int]:
    """The numbers half way from ``best`` to those tried before and after it."""
    at = tried.index(best)
    around = tried[max(at - 1, 0) : at + 2]
    return [number for number in {(best + each) // 2 for each in around} if number not in tried]


def _as_good(candidates: Sequence[Candidate], best: Candidate) -> tuple[float, float] | None:
    """The least and the most whose losses are not surely larger, compared run by run."""
    if len(best.losses) < 2:
        return None
    found = []
    for each in candidates:
        more = estimate([loss - least for loss, least in zip(each.losses, best.losses, strict=True)])
        if more.mean <= (more.margin or 0.0):
            found.append(each.value)
    return min(found), max(found)


def _numbers(most: int) -> list[int]:
    """0 to ``most``, with gaps that grow: 0, 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    found = [0, 1]
    while found[-1] < most:
        power = 2 ** (found[-1].bit_length() - 1)
        found.append(min(found[-1] + max(power // 2, 1), most))
    return found[: most + 1]


def _candidate(value: float, outcomes: Sequence[Outcome], loss: Callable[[Outcome], float]) -> Candidate:
    losses = [loss(each) for each in outcomes]
    return Candidate(value, losses, estimate(losses), estimate([outcome.goodput for outcome in outcomes]))


def _geometric(low: float, high: float) -> list[float]:
    if high <= low:
        return [low]
    return [low * (high / low) ** (number / (_FIRST - 1)) for number in range(_FIRST)]


def lowest(values: Sequence[float], losses: Sequence[float]) -> float:
    """Where the curve through the ``losses`` is lowest between the ``values``."""
    fine, curve = smooth(values, losses)
    return float(fine[curve.argmin()])


def smooth(values: Sequence[float], losses: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``a + b / x + c x + d x**2``, fitted to the losses by least squares: many values (4001,) and the curve (4001,).

    The terms are those of the loss itself: saves, lost work, and lost work to a higher order (Young 1974, Daly 2006).
    Of too few values the losses themselves.
    """
    import numpy as np

    middle = math.sqrt(values[0] * values[-1])
    x = np.asarray(values, dtype=np.float64) / middle
    terms = np.stack([np.ones_like(x), 1 / x, x, x**2], axis=1)
    if len(x) < terms.shape[1]:
        return x * middle, np.asarray(losses, dtype=np.float64)
    a, b, c, d = np.linalg.lstsq(terms, np.asarray(losses), rcond=None)[0]
    fine = np.geomspace(x[0], x[-1], 4001)
    return fine * middle, a + b / fine + c * fine + d * fine**2
