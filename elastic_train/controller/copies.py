"""On which other nodes the snapshots of a generation are kept (tier 1): the next ones in the ring that have room.

Where its members are on too few nodes, hosts that take no part keep copies, too: from the moment at which they join,
which is seconds before they can fork a trainer. The generation goes on without them as it would have without a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.members import choose_partners
from elastic_train.controller.setbacks import Pause


@dataclass(slots=True)
class _LeftOut:
    """A node that refused a copy, or could not be reached."""

    pause: Pause
    until: float


class Copies:
    """Chooses partners and remembers the nodes that are full.

    Args:
        wanted: ``snapshot.partners``.
        hosts: all that are connected.
        record: writes an event to the ledger.
        clock: seconds.
    """

    def __init__(
        self,
        wanted: int,
        hosts: Callable[[], Iterable[HostRecord]],
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted, self._hosts, self._record, self._clock = wanted, hosts, record, clock
        self._left_out: dict[str, _LeftOut] = {}
        self._told = wanted
        self._short = False
        """whether the members chosen for last are on too few nodes"""
        self._looked: tuple[int, set[str], list[int]] | None = None
        """generation, nodes that were left out, and hosts beside it, when partners were chosen last by ``look``"""

    def choose(self, members: Sequence[HostRecord]) -> list[list[HostRecord]]:
        """Partners by rank; says once when there are fewer than are wanted."""
        left_out = self._nodes_left_out()
        partners = choose_partners(members, self._wanted, left_out)
        nodes = {member.node for member in members}
        if self._is_short(partners):
            others = [host for host in self._hosts() if not host.leaving]
            partners = choose_partners(members, self._wanted, left_out, others)
            nodes.update(host.node for host in others)
        fewest = min(map(len, partners))
        if fewest < self._wanted and fewest != self._told:
            room = f", {len(left_out & nodes)} of them without room" if left_out & nodes else ""
            detail = f"snapshot.partners={self._wanted} needs {self._wanted + 1} nodes; there are {len(nodes)}{room}"
            self._record("fewer_copies", copies=fewest, detail=detail)
        self._told = fewest
        return partners

    def _is_short(self, partners: Sequence[Sequence[HostRecord]]) -> bool:
        self._short = min(map(len, partners)) < self._wanted
        return self._short

    def look(self, generation: Generation) -> None:
        """Nodes get full and are tried again, hosts join and leave: tell where the copies go from now on.

        Asked often, and nearly always nothing has changed.
        """
        beside = self._hosts() if self._short else ()
        numbers = [host.number for host in beside if not host.leaving and not generation.has(host)]
        looked = generation.number, self._nodes_left_out(), numbers
        if looked == self._looked:
            return
        self._looked = looked
        before, generation.partners = generation.partners, self.choose(generation.members)
        self.tell(generation, [rank for rank, chosen in enumerate(generation.partners) if chosen != before[rank]])

    def _nodes_left_out(self) -> set[str]:
        now = self._clock()
        return {node for node, entry in self._left_out.items() if entry.until > now}

    def tell(self, generation: Generation, ranks: Iterable[int]) -> None:
        """Let the hosts of ``ranks`` know their partners."""
        for rank in ranks:
            partners = generation.told_partners(rank)
            message = {"type": "partners", "generation": generation.number, "partners": partners}
            generation.members[rank].connection.send(message)

    def refused(self, node: str, sentence: str) -> None:
        """``node`` has no room for a copy."""
        self._leave_out(node, "partner_full", sentence)

    def dropped(self, node: str, sentence: str) -> None:
        """A copy could not be sent to ``node``, on which no member is."""
        self._leave_out(node, "partner_lost", sentence)

    def _leave_out(self, node: str, event: str, sentence: str) -> None:
        """For a while; longer each time."""
        entry = self._left_out.setdefault(node, _LeftOut(Pause(), 0.0))
        now = self._clock()
        if entry.until > now:
            return  # of another rank's copy
        seconds = entry.pause.next()
        entry.until = now + seconds
        self._record(event, node=node, retry_seconds=seconds, detail=sentence)

    def joined(self, node: str) -> None:
        """A host has come to ``node``: it may have room now."""
        self._left_out.pop(node, None)
