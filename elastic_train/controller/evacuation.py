"""The newest step, copied from nodes that are being taken away to hosts that stay, while nobody computes.

A host that has joined can hold images long before it can fork a trainer, and takes them in a fraction of the time that
object storage needs for the same bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from elastic_train.controller.current_run import CurrentRun
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import SnapshotSet
from elastic_train.controller.wire import Message


class _Copy(NamedTuple):
    """One image of one rank, ordered to be sent to ``node``."""

    generation: int
    rank: int
    step: int
    node: str


class Evacuation:
    """Of one coordinator."""

    def __init__(self, run: CurrentRun) -> None:
        self._run = run
        self._ordered: set[_Copy] = set()
        self._failures = Counter[int]()
        """by rank: each goes to the next host then"""

    def look(self) -> bool:
        """Order what is missing; returns whether the newest step is on its way to hosts that stay.

        Called often while the job waits, as hosts join and leave meanwhile.
        """
        staying, nodes = self._staying()
        snapshots = self._newest()
        if not staying or snapshots is None or snapshots.complete(nodes):
            return False
        self._ordered = {copy for copy in self._ordered if copy.node in nodes}
        for rank, holders in snapshots.holders.items():
            if nodes.isdisjoint(holders):
                self._order(snapshots, rank, staying[(rank + self._failures[rank]) % len(staying)])
        return True

    def is_done(self) -> bool:
        """Whether the newest step is whole on nodes that stay."""
        snapshots = self._newest()
        return snapshots is not None and snapshots.complete(self._staying()[1])

    def _newest(self) -> SnapshotSet | None:
        return self._run.inventory.newest_complete(self._run.members.nodes())

    def _staying(self) -> tuple[list[HostRecord], set[str]]:
        """Hosts, and their nodes."""
        staying = [host for host in self._run.members.hosts.values() if not host.leaving]
        return staying, {host.node for host in staying}

    def _order(self, snapshots: SnapshotSet, rank: int, partner: HostRecord) -> None:
        if any(copy[:3] == (snapshots.generation, rank, snapshots.step) for copy in self._ordered):
            return
        held = snapshots.holders[rank]
        senders = (host for node in held for host in self._run.members.by_node.get(node, ()))
        if (sender := next(senders, None)) is None:
            return  # it is lost in this moment
        told = {"generation": snapshots.generation, "rank": rank, "step": snapshots.step}
        to = partner.as_partner(needed=True)
        sender.connection.send({"type": "copy", "image": held[sender.node].image, "to": to, **told})
        self._ordered.add(_Copy(**told, node=partner.node))

    def failed(self, message: Message) -> None:
        """A host says that it could not send an image."""
        copy = _Copy(message["generation"], message["rank"], message["step"], message["node"])
        if copy in self._ordered:
            self._ordered.remove(copy)
            self._failures[copy.rank] += 1
            self._run.record("copy_failed", rank=copy.rank, step=copy.step, node=copy.node, detail=message["error"])
