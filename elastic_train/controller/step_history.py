"""Loss and gradient norm of all finished steps, in little memory: what bad steps are told by."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any


class StepHistory:
    """Grows with each finished step and is cut when the job goes back. 24 bytes per step."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._losses = array("d")
        self._norms = array("d")
        """NaN for a step that was left out"""

    def append(self, line: Mapping[str, Any]) -> None:
        """A line of ``steps.jsonl``; steps come in order."""
        bad = bool(line.get("skipped"))
        self._steps.append(line["step"])
        self._losses.append(math.nan if bad else line["loss"])
        self._norms.append(math.nan if bad else line["grad_norm"])

    def drop_after(self, step: int) -> None:
        """The job goes back to ``step``."""
        kept = bisect_right(self._steps, step)
        del self._steps[kept:], self._losses[kept:], self._norms[kept:]

    def bad_among(self, window: int) -> int:
        """How many of the last ``window`` steps were left out."""
        return sum(map(math.isnan, self._losses[-window:]))

    def good(self, window: int) -> dict[str, list[float]]:
        """``losses`` and ``norms`` of the last ``window`` steps that were not left out, oldest first."""
        places: list[int] = []
        for place in range(len(self._losses) - 1, -1, -1):
            if len(places) == window:
                break
            if not math.isnan(self._losses[place]):
                places.append(place)
        places.reverse()
        return {"losses": [self._losses[place] for place in places], "norms": [self._norms[place] for place in places]}
