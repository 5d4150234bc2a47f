"""Who is there: the hosts that are connected, their leases, and the newcomers among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.machine_facts import told
from elastic_train.controller.wire import Connection, Message

_STOOD_STILL_SECONDS = 1.0
"""Several times what lies between two looks."""


class Membership:
    """The hosts of one job.

    Args:
        record: writes an event to the ledger.
    """

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record
        self._count = 0
        self.hosts: dict[int, HostRecord] = {}
        self.by_node: dict[str, list[HostRecord]] = {}
        """only nodes with a host: where snapshots can be read"""
        self.first_ready: float | None = None
        """when the first host of this run was ready"""
        self._looked: float | None = None

    def count_from(self, number: int) -> None:
        """Numbers up to this one have been given before."""
        self._count = number

    def join(self, connection: Connection, message: Message, number: int | None = None) -> HostRecord:
        """A host has shown the token and says who it is; ``number``: what it was called before it came back."""
        event = "host_returned"
        if number is None or number in self.hosts:
            event, number = "host_joined", self._count + 1
        self._count = max(self._count, number)
        host = HostRecord(
            number=number,
            connection=connection,
            pid=message["pid"],
            node=message["node"],
            address=message["address"],
            byte_address=(message["bytes"][0], message["bytes"][1]),
            pool=message["pool"],
            joined=time.time(),
            told=told(message.get("machine")),
        )
        self.hosts[host.number] = host
        self.by_node.setdefault(host.node, []).append(host)
        self._record(event, host=host.number, node=host.node, pid=host.pid)
        return host

    def leave(self, host: HostRecord) -> None:
        """Its connection has ended."""
        del self.hosts[host.number]
        self.by_node[host.node].remove(host)
        if not self.by_node[host.node]:
            del self.by_node[host.node]

    def is_ready(self, host: HostRecord) -> None:
        """It can fork trainers from now on."""
        host.ready_since = time.time()
        self.first_ready = self.first_ready or host.ready_since

    def usable(self) -> list[HostRecord]:
        """Those that may be members of the next generation."""
        return [host for host in self.hosts.values() if host.usable]

    def all_there(self, members: Iterable[HostRecord]) -> bool:
        """Whether the process of each is connected and ready, under this number or another one."""
        there = {(host.node, host.pid) for host in self.hosts.values() if host.ready}
        return all((member.node, member.pid) in there for member in members)

    def ready_count(self) -> int:
        return sum(host.ready for host in self.hosts.values())

    def nodes(self) -> set[str]:
        """Where snapshots can be read."""
        return set(self.by_node)

    def superseded(self, message: Message) -> HostRecord | None:
        """The record of the very process that now joins over another connection: it gave up the one before."""
        there = self.by_node.get(message["node"], ())
        return next((host for host in there if host.pid == message["pid"]), None)

    def cut_silent(self, now: float, lease_seconds: float) -> bool:
        """End the connections that were not heard for as long as a lease; ``now`` is the event loop's time.

        Called often: when it was not, the event loop itself stood still, and what hosts said meanwhile is still to be
        read. Returns whether that is so.
        """
        stood_still = self._looked is not None and now - self._looked > max(_STOOD_STILL_SECONDS, lease_seconds / 2)
        self._looked = now
        for host in list(self.hosts.values()):
            if not stood_still and now - host.connection.last_heard > lease_seconds:
                host.silent = True
                host.connection.abort()
        return stood_still

    def tell(self, message: Message, but: Callable[[HostRecord], bool] = lambda host: False) -> None:
        """Send ``message`` to all hosts, ``but`` those."""
        for host in self.hosts.values():
            if not but(host):
                host.connection.send(message)

    def close(self) -> None:
        """End all connections."""
        for host in self.hosts.values():
            host.connection.close()
