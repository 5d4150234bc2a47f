"""Finished steps and saved ones: what a stretch of undisturbed work achieves, and what a failure takes back.

Steps between two interruptions are not simulated one by one: their times are arithmetic.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_LATE = 1e-9
"""of a step: a step that ends with the stretch is finished"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a stretch of work came to: counts of steps, seconds of the rest."""

    new: int
    replayed: int
    stall: float
    unfinished: float
    """of the step under way when it ended"""


@dataclass(slots=True)
class Kept:
    """What was computed of a step before a pause that does not lose it: a share of the step, and the time it took."""

    fraction: float = 0.0
    seconds: float = 0.0
    host_seconds: float = 0.0


class Progress:
    """Of one run.

    Args:
        every: steps between two saves.
        stall: seconds that each of them holds the steps up.
        save_seconds: from its beginning to its commit.
    """

    def __init__(self, every: int, stall: float, save_seconds: float) -> None:
        self._every, self._stall, self._save_seconds = every, stall, save_seconds
        self.finished = self.furthest = self.committed = 0
        self._saving: deque[tuple[float, int]] = deque(maxlen=3)
        """when a save will be committed, and its step; the newest three"""

    def work(self, begin: float, until: float, step: float, credit: float = 0.0) -> Stretch:
        """Steps of ``step`` seconds from ``begin`` to ``until``; ``credit``: seconds of the first one done before."""
        left = until - begin + credit
        to_save = self._every - self.finished % self._every
        lead = to_save * step
        if left < lead + self._stall and self._stall > 0 and left >= lead:  # ends in the first save's stall
            cycles, rest, steps, stall = 0, 0.0, to_save, left - lead
        elif left < lead:
            steps = math.floor(left / step + _LATE)
            cycles, rest, stall = -1, left - steps * step, 0.0
        else:
            length = self._stall + self._every * step
            cycles = math.floor((left - lead) / length)
            within = left - lead - cycles * length
            stall = cycles * self._stall + min(within, self._stall)
            extra = math.floor(max(within - self._stall, 0.0) / step + _LATE)
            steps, rest = to_save + cycles * self._every + extra, max(within - self._stall, 0.0) - extra * step
        self._begin_saves(begin - credit + lead, self._stall + self._every * step, self.finished + to_save, cycles)
        return Stretch(*self._finish(steps), stall, max(rest, 0.0))

    def _begin_saves(self, first: float, period: float, step: int, last: int) -> None:
        """Saves number 0 to ``last``, of which only the newest can matter."""
        for number in range(max(0, last - 2), last + 1):
            self._saving.append((first + number * period + self._save_seconds, step + number * self._every))

    def _finish(self, steps: int) -> tuple[int, int]:
        """(new, replayed) of so many more."""
        replayed = min(steps, max(self.furthest - self.finished, 0))
        self.finished += steps
        self.furthest = max(self.furthest, self.finished)
        return steps - replayed, replayed

    def save(self) -> None:
        """The newest finished step, at once."""
        self.committed = self.finished

    def fall_back(self, now: float) -> int:
        """What is in memory is lost: go on from the newest committed save; returns the steps lost.

        A save under way is lost, too. When more than three are under way at once, one that is too old is taken.
        """
        done = [step for commit, step in self._saving if commit <= now]
        self.committed = max([self.committed, *done])
        self._saving.clear()
        lost = self.finished - self.committed
        self.finished = self.committed
        return lost
