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

    def charge(self, cause: Cause, seconds: float, hosts: int) -> None:
        if seconds > 0 and hosts > 0:
            self.seconds[cause] += seconds * hosts

    def step(self, cause: Cause, seconds: float, hosts: int, beside: Mapping[Cause, float]) -> None:
        """Seconds of steps, of which the shares ``beside`` were not computing."""
        for other, share in beside.items():
            self.charge(other, seconds * share, hosts)
        self.charge(cause, seconds * (1 - sum(beside.values())), hosts)

    def note(self, now: float) -> None:
        """A moment of the history; of too many every second one will do."""
        if self._history:
            self.moments.append((now, dict(self.seconds)))
            if len(self.moments) > _MOMENTS:
                self.moments = self.moments[1::2]
