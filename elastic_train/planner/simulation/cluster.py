"""The nodes of a simulated cluster: which are there, which hosts the job uses, whom a failure hits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from elastic_train.config.faults import NODE_KINDS, Kind
from elastic_train.planner.simulation.failures import Failure


class Victim(NamedTuple):
    """``is_member``: one of the job's hosts, and not a spare."""

    place: int
    is_member: bool


class Cluster:
    """Places 0 .. ``places - 1``, one node each. The job uses the hosts of the nodes that have been there longest.

    Attributes:
        used: hosts that take part in the job.
        ready: all that could.
        starting: hosts that have come and cannot compute yet.
    """

    def __init__(self, places: int, hosts_per_node: int) -> None:
        self._nodes = dict.fromkeys(range(places), hosts_per_node)
        """place -> hosts that are ready"""
        self._sizes = Counter({hosts_per_node: places})
        """hosts on a node -> nodes with so many"""
        self.ready = places * hosts_per_node
        self.used = 0
        self._starting: dict[int, int] = {}
        self.starting = 0
        self.age = Counter[int]()
        """place -> nodes that have gone from it: who starts there is forgotten with the node"""
        self._ring: list[int] = []
        """places of the job's nodes when it last ran, in their order: each has copies on the next ones"""
        self._gone: set[int] = set()
        """those of them whose memory was lost since"""

    @property
    def sizes(self) -> dict[int, int]:
        """Hosts on a node -> nodes with so many."""
        return {hosts: count for hosts, count in self._sizes.items() if count}

    def victims(self, failure: Failure) -> list[Victim]:
        """Whom ``failure`` strikes; empty when there is nobody, or only hosts that are not ready yet."""
        struck = [failure, *(replace(failure, node=place) for place in failure.beside)]
        return [victim for each in struck if (victim := self._victim(each)) is not None]

    def _victim(self, failure: Failure) -> Victim | None:
        if failure.node is not None:
            return self._victim_on(failure.node, failure)
        if failure.kind in NODE_KINDS:
            there = sorted({*self._nodes, *self._starting})
            return self._victim_on(there[int(failure.pick * len(there))], failure) if there else None
        hosts = self.used if failure.kind in (Kind.KILL_TRAINER, Kind.HANG) else self.ready
        number = int(failure.pick * hosts)
        return Victim(self._place_of(number), number < self.used) if hosts else None

    def _victim_on(self, place: int, failure: Failure) -> Victim | None:
        hosts, members = self._nodes.get(place, 0), self._members_on(place)
        if failure.kind in NODE_KINDS or failure.repair:
            return Victim(place, members > 0) if hosts or place in self._starting else None
        return Victim(place, failure.pick * hosts < members) if hosts else None

    def _place_of(self, number: int) -> int:
        """Of the host with this number, those of the job first."""
        for place, hosts in self._nodes.items():
            if number < hosts:
                return place
            number -= hosts
        raise IndexError(number)

    def _members_on(self, place: int) -> int:
        """Hosts of the job there."""
        if self.used == self.ready:
            return self._nodes.get(place, 0)
        before = 0
        for each, hosts in self._nodes.items():
            if each == place:
                return max(min(self.used - before, hosts), 0)
            before += hosts
        return 0

    def lose_node(self, place: int, *, memory: bool) -> int:
        """It goes away, its ``memory`` at once or only after it was read; returns the hosts that it had."""
        hosts = self._nodes.pop(place, 0)
        starting = self._starting.pop(place, 0)
        if hosts:
            self._sizes[hosts] -= 1
        self.ready -= hosts
        self.starting -= starting
        self.age[place] += 1
        self._lose_memory(place, handed_on=not memory)
        return hosts + starting

    def _lose_memory(self, place: int, *, handed_on: bool) -> None:
        """Of a node that goes; those that remain have what it ``handed_on``, when there are any."""
        if place not in self._ring:
            return
        if handed_on and place not in self._gone and len(self._ring) > len(self._gone) + 1:
            self._ring.remove(place)
        else:
            self._gone.add(place)

    def lose_host(self, place: int) -> None:
        """One host of the node ends; the memory of the node stays."""
        self._resize(place, -1)

    def come(self, place: int, hosts: int) -> None:
        """They are there, and start."""
        self._starting[place] = self._starting.get(place, 0) + hosts
        self.starting += hosts

    def start(self, place: int, hosts: int) -> None:
        """They are ready; they join the end of the queue."""
        self._starting[place] -= hosts
        self.starting -= hosts
        if not self._starting[place]:
            del self._starting[place]
        self._resize(place, hosts)

    def _resize(self, place: int, change: int) -> None:
        before = self._nodes.get(place, 0)
        if before:
            self._sizes[before] -= 1
        after = before + change
        self._sizes[after] += 1
        self.ready += change
        self._nodes[place] = after
        if not after:
            self._sizes[0] -= 1
            del self._nodes[place]

    def running(self) -> None:
        """The state is whole in the memory of the nodes that the job uses, with all copies; spares have none."""
        places, idle = list(self._nodes), self.ready - self.used
        while places and idle >= self._nodes[places[-1]]:
            idle -= self._nodes[places.pop()]
        self._ring = sorted(places)
        self._gone.clear()

    def forget(self) -> None:
        """What is in memory is of no use any more."""
        self._ring = []
        self._gone.clear()

    def state_is_lost(self, partners: int) -> bool:
        """Whether a node of the job and the next ``partners`` around the ring have gone since the job last ran."""
        return any(self._gone.issuperset(self._partners(place, partners)) for place in self._gone)

    def _partners(self, place: int, count: int) -> list[int]:
        at = self._ring.index(place)
        return [*self._ring[at + 1 :], *self._ring[:at]][:count]
