"""Where the hosts' time goes in a simulated run, as the ledger of a real one says it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from elastic_train.config.time_causes import Cause

_MOMENTS = 4000


class Account:
    """Host-seconds by cause; with ``history`` also what they were at moments in between."""

    def __init__(self, *, history: bool = False) -> None:
        self.seconds: dict[Cause, float] = defaultdict(float)
        self._history = history
        self.moments: list[tuple[float, dict[Cause, float]]] = []
        """(time, seconds by cause since the start)"""

    def charge(self, cause: Cause, host_seconds: float) -> None:
        if host_seconds:
            self.seconds[cause] += host_seconds

    def step(self, cause: Cause, host_seconds: float, beside: Mapping[Cause, float]) -> None:
        """Of steps, of which the shares ``beside`` were not computing. What was charged too early is taken back."""
        for other, share in beside.items():
            self.charge(other, host_seconds * share)
        self.charge(cause, host_seconds * (1 - sum(beside.values())))

    def note(self, now: float) -> None:
        """A moment of the history; of too many every second one will do."""
        if self._history:
            self.moments.append((now, dict(self.seconds)))
            if len(self.moments) > _MOMENTS:
                self.moments = self.moments[1::2]
