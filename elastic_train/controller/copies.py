"""On which other nodes the snapshots of a generation are kept (tier 1): the next ones in the ring that have room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.members import choose_partners
from elastic_train.controller.setbacks import Pause


@dataclass(slots=True)
class _Full:
    """A node that refused a copy."""

    pause: Pause
    until: float


class Copies:
    """Chooses partners and remembers the nodes that are full.

    Args:
        wanted: ``snapshot.partners``.
        record: writes an event to the ledger.
        clock: seconds.
    """

    def __init__(self, wanted: int, record: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._record, self._clock = wanted, record, clock
        self._full: dict[str, _Full] = {}
        self._told = wanted
        self._looked: tuple[int, set[str]] | None = None
        """generation, and the nodes that were full, when partners were chosen last by ``look``"""

    def choose(self, members: Sequence[HostRecord]) -> list[list[HostRecord]]:
        """Partners by rank; says once when there are fewer than are wanted."""
        full = self._full_nodes()
        partners = choose_partners(members, self._wanted, full)
        fewest = min(map(len, partners))
        if fewest < self._wanted and fewest != self._told:
            nodes = {member.node for member in members}
            room = f", {len(full & nodes)} of them without room" if full & nodes else ""
            detail = f"snapshot.partners={self._wanted} needs {self._wanted + 1} nodes; there are {len(nodes)}{room}"
            self._record("fewer_copies", copies=fewest, detail=detail)
        self._told = fewest
        return partners

    def look(self, generation: Generation) -> None:
        """Nodes get full and are tried again: tell the hosts where their copies go from now on.

        Asked often, and nearly always nothing has changed.
        """
        looked = generation.number, self._full_nodes()
        if looked == self._looked:
            return
        self._looked = looked
        before, generation.partners = generation.partners, self.choose(generation.members)
        self.tell(generation, [rank for rank, chosen in enumerate(generation.partners) if chosen != before[rank]])

    def _full_nodes(self) -> set[str]:
        now = self._clock()
        return {node for node, entry in self._full.items() if entry.until > now}

    def tell(self, generation: Generation, ranks: Iterable[int]) -> None:
        """Let the hosts of ``ranks`` know their partners."""
        for rank in ranks:
            partners = [partner.as_partner() for partner in generation.partners[rank]]
            message = {"type": "partners", "generation": generation.number, "partners": partners}
            generation.members[rank].connection.send(message)

    def refused(self, node: str, sentence: str) -> None:
        """Leave ``node``, which has no room for a copy, out for a while; longer each time."""
        entry = self._full.setdefault(node, _Full(Pause(), 0.0))
        now = self._clock()
        if entry.until > now:
            return  # of another rank's copy
        seconds = entry.pause.next()
        entry.until = now + seconds
        self._record("partner_full", node=node, retry_seconds=seconds, detail=sentence)

    def joined(self, node: str) -> None:
        """A host has come to ``node``: it may have room now."""
        self._full.pop(node, None)
