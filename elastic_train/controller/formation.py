"""How long each part of a generation's forming takes, from the failure before it to its first finished step."""

from __future__ import annotations

from collections import Counter

from elastic_train.config.time_causes import Cause

_ENDS = {"forked": Cause.FORM, "build": Cause.RESTORE, "restore": Cause.FIRST_STEP}
"""What all ranks must have done -> what begins then. (``group`` is a part of forming, and ends nothing.)"""


class Formation:
    """Of one generation; moments are Unix seconds of the coordinator's clock.

    Args:
        ranks: that all have to do each part.
        happened: when what led to it failed, as far as that is known: the last sign of life.
        seen: when the coordinator knew.
        assigned: when the hosts were told what to do.
    """

    def __init__(self, ranks: int, happened: float, seen: float, assigned: float) -> None:
        self._ranks, self._assigned = ranks, assigned
        self._happened, self._seen = min(happened, seen), seen
        self._did: Counter[str] = Counter()
        self._begins: dict[Cause, float] = {}
        self.phases: dict[str, float] = {}
        """the slowest rank's own seconds for ``group`` and ``build``, the two parts of forming"""

    def did(self, part: str, at: float, seconds: float = 0.0) -> Cause | None:
        """A rank has done ``part``, which took it ``seconds``; returns what begins now, if it was the last one."""
        if part in ("group", "build"):
            self.phases[part] = max(self.phases.get(part, 0.0), seconds)
        self._did[part] += 1
        cause = _ENDS.get(part)
        if cause is None or self._did[part] < self._ranks:
            return None
        self._begins[cause] = at
        return cause

    def seconds(self, first_step: float) -> dict[str, float]:
        """The parts, which add up to ``recovery_seconds``; ``first_step``: when that was finished."""
        moments = [self._happened, self._seen]
        for cause in (Cause.FORM, Cause.RESTORE, Cause.FIRST_STEP):
            moments.append(max(self._begins.get(cause, self._assigned), moments[-1]))
        moments.append(max(first_step, moments[-1]))
        names = (Cause.DETECTION, Cause.TEARDOWN, Cause.FORM, Cause.RESTORE, Cause.FIRST_STEP)
        parts = {f"{name}_seconds": end - begin for name, begin, end in zip(names, moments, moments[1:], strict=False)}
        return {**parts, "recovery_seconds": moments[-1] - moments[0]}
