"""What the members of a generation do from which moment on: they share it, as all of them wait for each other."""

from __future__ import annotations

from collections import defaultdict

from elastic_train.config.time_causes import Cause

Spent = dict[str, float]
"""Seconds by cause."""


STEP = "step"
"""On the timeline: a step that is under way; what it turns out to be is known when it ends."""


class Timeline:
    """What the members of a generation do from which moment on (Unix seconds)."""

    def __init__(self, at: float, what: str) -> None:
        self._marks = [(at, what)]
        self._failed: tuple[int, float, float] | None = None
        """marks before the failure, when it happened, when it was seen"""

    @property
    def now(self) -> str:
        """What they do at present."""
        return self._marks[-1][1]

    def enter(self, what: str, at: float) -> None:
        """They turn to ``what``; a moment before the last one counts as that one."""
        self._marks.append((max(at, self._marks[-1][0]), what))

    def failed(self, happened: float, seen: float) -> None:
        """Called again for the echoes of one failure: the earliest moments count."""
        if self._failed is None:
            begin, what = self._marks[-1]
            self._marks[-1] = begin, Cause.LOST_STEP if what == STEP else what
            self._failed = len(self._marks), happened, seen
        count, *earlier = self._failed
        self._failed = count, min(happened, earlier[0]), min(seen, earlier[1])
        del self._marks[count:]
        self.enter(Cause.DETECTION, self._failed[1])
        self.enter(Cause.TEARDOWN, self._failed[2])

    @property
    def has_failed(self) -> bool:
        return self._failed is not None

    def step_was(self, cause: str) -> None:
        """The step that was under way when it failed is there after all."""
        self._marks = [(at, cause if what == Cause.LOST_STEP else what) for at, what in self._marks]

    def spent(self, since: float, until: float) -> Spent:
        """Seconds by what was done between two moments."""
        spent: Spent = defaultdict(float)
        ends = [at for at, _ in self._marks[1:]] + [until]
        for (begin, what), end in zip(self._marks, ends, strict=True):
            spent[what] += max(min(end, until) - max(begin, since), 0.0)
        return spent
