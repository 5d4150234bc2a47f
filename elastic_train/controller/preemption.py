"""Nodes that are taken away by appointment: who is leaving, until when, and when they may go.

A notice (a drain in Ray, a spot notice of the cloud) gives a node and often a deadline. The job goes on without the
node's hosts from the next finished step, whose images the others read from the leaving node while it is still there;
then its hosts are told to end. ``Leaving`` forms and tells; here is only what it goes by.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.trouble import Trouble

_PATIENCE = 0.5
"""of the time until the deadline: so long a step in flight may take to be finished"""
_MOST_PATIENCE_SECONDS = 30.0
_LAST_SHARE = 0.1
"""of that time is left to the hosts to end in, whatever they are still needed for"""
_LAST_SECONDS = 2.0
"""but no more than this"""
LEFT = "preempted"
"""the reason that hosts are told, and return to Ray Train"""


@dataclass(frozen=True, slots=True)
class Notice:
    """One node's end, on ``clock``'s time. ``deadline`` is infinite where none is known."""

    node: str
    reason: str
    came: float
    deadline: float

    @property
    def patience_ends(self) -> float:
        """From here on the job does not wait for the step in flight."""
        return self.came + min(_PATIENCE * (self.deadline - self.came), _MOST_PATIENCE_SECONDS)

    @property
    def last_moment(self) -> float:
        """From here on the hosts end, whatever they are still needed for."""
        return self.deadline - min(_LAST_SHARE * (self.deadline - self.came), _LAST_SECONDS)


class Preemption:
    """The nodes of one job that are being taken away.

    Args:
        record: writes an event to the ledger.
        clock: seconds, monotonic.
    """

    def __init__(self, record: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._record, self._clock = record, clock
        self._notices: dict[str, Notice] = {}
        self._told: set[int] = set()

    def notice(self, node: str, seconds: float | None, reason: str, hosts: Iterable[HostRecord]) -> bool:
        """``node`` ends in ``seconds`` (None: some time); its ``hosts`` leave. False when that was known already."""
        now = self._clock()
        deadline = math.inf if seconds is None else now + max(0.0, seconds)
        known = self._known(node)
        if known is not None and deadline >= known.deadline - _LAST_SECONDS:
            return False  # each host of a node tells of it, and a poll finds it again
        self._notices[node] = Notice(node, reason, now, deadline)
        for host in hosts:
            host.leaving = True
        self._record("preemption_notice", node=node, deadline_seconds=seconds, reason=reason)
        return True

    def _known(self, node: str) -> Notice | None:
        """The notice of a node, until its deadline: one that is still there after it was not taken away."""
        found = self._notices.get(node)
        return found if found is not None and found.deadline >= self._clock() else None

    def joined(self, host: HostRecord) -> None:
        """A newcomer is not taken in on a node that is being taken away."""
        host.leaving = self._known(host.node) is not None

    def cause(self, generation: Generation) -> Trouble | None:
        """Why ``generation`` must be formed anew without some of its members; None while nobody of them leaves."""
        nodes = self._nodes_of(generation)
        if not nodes:
            return None
        told = [f"node {node[:8]} is being taken away: {self._notices[node].reason}" for node in sorted(nodes)]
        return Trouble("preemption", "; ".join(told))

    def _nodes_of(self, generation: Generation) -> set[str]:
        """Nodes with members that leave."""
        if not self._notices:
            return set()  # asked at every step, and nearly always this says it
        return {member.node for member in generation.members if member.leaving}

    def seconds_left(self) -> float:
        """Until the first of the nodes is gone; infinite when that is not known of any."""
        now = self._clock()
        return min((end - now for end in (n.deadline for n in self._notices.values()) if end >= now), default=math.inf)

    def presses(self, generation: Generation) -> bool:
        """Whether a member must leave before the step in flight is finished."""
        return any(self._clock() >= self._notices[node].patience_ends for node in self._nodes_of(generation))

    def to_tell(self, hosts: Iterable[HostRecord], needed: Callable[[HostRecord], bool]) -> list[HostRecord]:
        """Those that are to end now, each named once: nothing is ``needed`` of them, or it is the last moment."""
        if not self._notices:
            return []
        now = self._clock()
        leaving = [host for host in hosts if host.leaving and host.number not in self._told]
        found = [host for host in leaving if now >= self._notices[host.node].last_moment or not needed(host)]
        self._told.update(host.number for host in found)
        return found

    def left(self, host: HostRecord) -> bool:
        """The connection of ``host`` has ended; returns whether that is because it was told to end."""
        if host.number not in self._told:
            return False
        self._told.discard(host.number)
        deadline = self._notices[host.node].deadline
        seconds = None if math.isinf(deadline) else round(deadline - self._clock(), 3)
        self._record("host_left", host=host.number, node=host.node, pid=host.pid, seconds_left=seconds)
        return True
