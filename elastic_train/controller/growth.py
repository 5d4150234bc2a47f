"""Whether newcomers are worth a pause: what they gain until the horizon against what taking them in costs."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.planner.layouts import LayoutChoice, step_seconds

_DEFAULT_PAUSE_SECONDS = 5.0
"""Assumed until this run has seen a re-forming."""
_RECENT_STEPS = 20
_RECENT_PAUSES = 5


@dataclass(frozen=True, slots=True)
class GrowthDecision:
    """What would be gained and what it would cost; all times in seconds."""

    grows: bool
    step_seconds: float
    """now, measured"""
    candidate_seconds: float
    """with the newcomers: the measured time times the ratio of the planner's estimates"""
    steps: float
    """over which the gain is summed: those of the horizon, or those that are left"""
    gain: float
    pause: float
    stable: float
    """since the last loss of a host"""

    def __str__(self) -> str:
        lost = "no host lost" if math.isinf(self.stable) else f"last host lost {self.stable:.0f} s ago"
        return (
            f"a step takes {self.step_seconds:.3f} s, by estimate {self.candidate_seconds:.3f} s with them; "
            f"gain {self.gain:.2f} s in {self.steps:.0f} steps, pause {self.pause:.2f} s; {lost}"
        )


def decide_growth(
    *,
    step_seconds: float,
    cost_ratio: float,
    steps_left: int,
    pause: float,
    stable: float,
    horizon: float,
    margin: float,
) -> GrowthDecision:
    """Growth pays if what it saves within the horizon is more than ``margin`` pauses.

    Args:
        cost_ratio: planner's estimate with the newcomers over that of the present layout.
        stable: seconds since the last loss of a host; inf: none was lost. Hosts that come and go are expected to stay
            no longer than that, so a flapping host is not taken in before it has been there for as long as it must
            stay to be worth it.
        horizon: seconds, at most.
    """
    candidate = step_seconds * cost_ratio
    steps = min(steps_left, min(horizon, stable) / step_seconds)
    gain = steps * (step_seconds - candidate)
    grows = cost_ratio < 1 and gain > margin * pause
    return GrowthDecision(grows, step_seconds, candidate, steps, gain, pause, stable)


class Growth:
    """Collects what the decision needs during one run, and says in the ledger when it changes.

    Args:
        record: writes an event to the ledger.
        clock: seconds.
    """

    def __init__(self, job: Job, record: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._hosts, self._all_steps = job, job.hosts, job.training.steps
        self._record, self._clock = record, clock
        self._present: LayoutChoice | None = None
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._pauses: deque[float] = deque(maxlen=_RECENT_PAUSES)
        self._last_loss = -math.inf
        self._said: tuple[bool, str] | None = None
        self.due: str | None = None
        """why newcomers are taken in at the next finished step, if they are"""

    def formed(self, choice: LayoutChoice) -> None:
        """A generation with this layout is being formed."""
        self._present = choice
        self._seconds.clear()
        self._said = self.due = None

    def running(self, cause: str, recovery_seconds: float) -> None:
        """The generation has finished its first step so long after ``cause`` was seen."""
        if cause != "start":
            self._pauses.append(recovery_seconds)

    def step_finished(self, seconds: float) -> None:
        """A step of the present generation took so long."""
        self._seconds.append(seconds)

    def host_lost(self) -> None:
        self._last_loss = self._clock()

    def consider(self, candidate: LayoutChoice | None, finished_step: int) -> str | None:
        """The reason to take newcomers in at the next step, or None; ``candidate``: the best layout with them."""
        self.due = self._decide(candidate, finished_step)
        return self.due

    def _decide(self, candidate: LayoutChoice | None, finished_step: int) -> str | None:
        present = self._present
        if candidate is None or present is None or not self._seconds:
            return None
        # Both for the same machines: what the hosts are, and how many share a node, may have changed since.
        cost = step_seconds(self._job, present.layout, candidate.accelerator)
        if candidate.cost >= cost:
            return None
        decision = decide_growth(
            step_seconds=statistics.median(self._seconds),
            cost_ratio=candidate.cost / cost,
            steps_left=self._all_steps - finished_step,
            pause=statistics.median(self._pauses) if self._pauses else _DEFAULT_PAUSE_SECONDS,
            stable=self._clock() - self._last_loss,
            horizon=self._hosts.growth_horizon_seconds,
            margin=self._hosts.growth_margin,
        )
        detail = f"{present.layout} -> {candidate.layout}: {decision}"
        if (decision.grows, str(candidate.layout)) != self._said:
            self._said = decision.grows, str(candidate.layout)
            self._record("growth_considered", grows=decision.grows, detail=detail)
        return detail if decision.grows else None
