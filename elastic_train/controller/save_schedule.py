"""When a checkpoint is due: every so many steps, soon again after one that failed or was skipped."""

from __future__ import annotations

import time
from typing import Any

from elastic_train.checkpoint.interval import (
    Measured,
    SaveCost,
    interval_steps,
    mean_time_between_failures,
    worth_a_change,
)
from elastic_train.config.operation import CheckpointConfig


class SaveSchedule:
    """Of one coordinator. A fixed interval falls on its multiples, a tuned one is counted from the last save."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.interval = config.every_steps
        self._tuned = config.interval == "tuned"
        self._cost = SaveCost()
        self._started = time.monotonic()
        self._failures = 0
        self._last = 0
        """step of the last save, or where the job began"""
        self._again: int | None = None
        """step from which a save that failed or was skipped is tried again"""
        self._failed_saves = 0

    def start(self, step: int) -> None:
        """The job begins after ``step``."""
        self._last, self._started = step, time.monotonic()

    def due(self, step: int) -> bool:
        """Whether the finished ``step`` should be saved."""
        return self._regular(step) or (self._again is not None and step >= self._again)

    def begun(self, step: int) -> None:
        self._last, self._again = step, None

    def skipped(self, step: int) -> bool:
        """A due save was not begun as another one is going on: the next finished step is due, too.

        Returns whether that is news: of a row of such steps only the first is.
        """
        news = self._again is None or (self._regular(step) and not self._tuned)
        self._again = step + 1
        return news

    def failed(self, finished_step: int) -> None:
        """Again at the next step, then after 2, 4, 8, ...: a storage that is gone is not asked at every step."""
        self._again = finished_step + min(2**self._failed_saves, self.interval)
        self._failed_saves += 1

    def go_back(self, step: int) -> None:
        """The steps after ``step`` are done again."""
        self._last = min(self._last, step)
        if self._again is not None:
            self._again = min(self._again, step + 1)

    def step(self, seconds: float, saving: bool) -> None:
        """A step has finished, ``saving`` when a save was going on meanwhile."""
        self._cost.step(seconds, saving)

    def trouble(self) -> None:
        """A failure that took work away."""
        self._failures += 1

    def committed(self, save_seconds: float) -> dict[str, Any] | None:
        """A save is over; what a tuned interval changes to and why, None when it stays."""
        self._failed_saves = 0
        self._cost.saved()
        if not self._tuned or not self._cost.known:
            return None
        mtbf = mean_time_between_failures(time.monotonic() - self._started, self._failures)
        measured = Measured(self._cost.seconds, save_seconds, mtbf, self._cost.step_seconds)
        better, before = interval_steps(measured, self._config.min_steps, self._config.max_steps), self.interval
        if not worth_a_change(before, better):
            return None
        self.interval = better
        return {
            "steps": better,
            "before": before,
            "cost_seconds": measured.cost,
            "mtbf_seconds": measured.mtbf,
            "step_seconds": measured.step_seconds,
            "save_seconds": measured.save_seconds,
        }

    def _regular(self, step: int) -> bool:
        return step - self._last >= self.interval if self._tuned else step % self.interval == 0
