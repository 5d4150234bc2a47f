"""A host's lease: for how long it may train without an answer of the coordinator."""

from __future__ import annotations

from elastic_train.config.operation import FailureConfig

_SPARE_HEARTBEATS = 3
_MOST_SPARE = 0.25
"""of the lease, whatever the heartbeats"""


_MOST_HEARTBEATS = 4000.0
"""per second, of all hosts together: one process answers them"""
_LEAST_HEARTBEATS = 4
"""in the time after which silence, or no progress, means something"""


def heartbeat_seconds(failure: FailureConfig, hosts: int) -> float:
    """Between two heartbeats of each of so many ``hosts``: longer than ``failure.heartbeat_seconds`` if these are many.

    A lease is as long as ever, and no heartbeat is lost on a connection that lasts: silence is found out no later, and
    a hang by no more than what lies between two heartbeats.
    """
    longest = min(failure.lease_seconds, failure.hang_seconds) / _LEAST_HEARTBEATS
    return max(failure.heartbeat_seconds, min(hosts / _MOST_HEARTBEATS, longest))


class Lease:
    """Granted by the answer to a heartbeat, from the moment at which that heartbeat was *sent*.

    The coordinator counts from when it last heard the host, which is no earlier. So a host that gives up after
    ``seconds`` has killed its trainer before the coordinator forms the next generation without it, whichever direction
    of the link is broken and whatever the two clocks say. Only their rates must be the same within a few percent.

    Args:
        now: seconds of any monotonic clock; that of ``answered`` and ``is_over``.
    """

    def __init__(self, failure: FailureConfig, now: float) -> None:
        spare = min(_SPARE_HEARTBEATS * failure.heartbeat_seconds, _MOST_SPARE * failure.lease_seconds)
        self.seconds = failure.lease_seconds - spare
        """shorter than the coordinator's by three heartbeats, but by no more than a quarter"""
        self._since = now

    def answered(self, sent: float) -> None:
        """The coordinator has answered the heartbeat that was sent at ``sent``."""
        self._since = max(self._since, sent)

    def left(self, now: float) -> float:
        """Seconds until it is over; negative afterwards."""
        return self._since + self.seconds - now
