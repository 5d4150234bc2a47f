"""How often to save: what saves cost against what failures take away. Plain arithmetic on measured seconds.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

MTBF_PRIOR_SECONDS = 3 * 3600.0
"""Assumed of a job that has had no failure yet. It is that of 16,384 accelerators (419 unexpected interruptions in 54
days: "The Llama 3 Herd of Models", 2024), so a smaller job saves rather too often until it has run for longer."""
CHANGE = 0.2
"""An interval stays until the better one differs by more than this share: near the optimum the waste is flat."""
_QUIET_STEPS = 64
_SAVES = 5


def young(cost: float, mtbf: float) -> float:
    """Seconds of work between two saves: ``sqrt(2 C M)`` (Young 1974).

    ``cost`` C is what one save takes from the work, ``mtbf`` M the mean time between failures, both in seconds.
    """
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """As :func:`young`, to a higher order (Daly 2006), which matters when ``cost`` is no small part of ``mtbf``.

    ``sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C`` for C < 2 M, else M.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def mean_time_between_failures(elapsed: float, failures: int) -> float:
    """Of a job that has run ``elapsed`` seconds. Without a failure it is the time so far, at least the prior.

    All failures count, also those that a snapshot in memory answers: which of them will take that with them cannot be
    known, and an interval that is too short costs less than one that is too long.
    """
    return elapsed / failures if failures else max(elapsed, MTBF_PRIOR_SECONDS)


class SaveCost:
    """What saves cost: by how much the steps take longer while one is going on."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self._costs: deque[float] = deque(maxlen=_SAVES)
        self._during: list[float] = []

    def step(self, seconds: float, saving: bool) -> None:
        """A step has finished; ``seconds`` with all that it waited for, ``saving`` when a save was going on."""
        (self._during if saving else self._quiet).append(seconds)

    def saved(self) -> None:
        """A save is over."""
        if self._quiet:
            self._costs.append(max(sum(self._during) - len(self._during) * self.step_seconds, 0.0))
        self._during = []

    @property
    def known(self) -> bool:
        return bool(self._costs)

    @property
    def seconds(self) -> float:
        """The median of the last saves: one slow step of another cause must not change the interval."""
        return median(self._costs)

    @property
    def step_seconds(self) -> float:
        """A step's, while no save is going on."""
        return median(self._quiet)


@dataclass(frozen=True, slots=True)
class Measured:
    """All in seconds: a save's ``cost`` and how long it takes, mean time between failures, a step without a save."""

    cost: float
    save_seconds: float
    mtbf: float
    step_seconds: float


def interval_steps(measured: Measured, min_steps: int, max_steps: int) -> int:
    """Steps between two saves: Daly's, no shorter than a save takes, inside the bounds, which have the last word."""
    seconds = max(daly(measured.cost, measured.mtbf), measured.save_seconds)
    return min(max(math.ceil(seconds / measured.step_seconds), min_steps), max_steps)


def worth_a_change(now: int, better: int) -> bool:
    """Whether the interval of ``now`` steps should become ``better``."""
    return abs(better - now) > CHANGE * now
