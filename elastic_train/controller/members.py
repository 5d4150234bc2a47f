"""Which hosts take part in a generation, and which of them keep copies for each other."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Sequence

from elastic_train.controller.host_record import HostRecord


def choose_partners(
    members: Sequence[HostRecord], count: int, full: Collection[str] = (), others: Sequence[HostRecord] = ()
) -> list[list[HostRecord]]:
    """By rank up to ``count`` hosts, each on a different other node, for the copies of its snapshots.

    The next nodes in the ring of nodes take them, but those that are ``full``, and inside a node the host of the same
    position, so that the copies spread evenly. Where the members have too few nodes, so do those of ``others``.
    """
    nodes: dict[str, list[HostRecord]] = {}
    places = []
    for member in members:
        nodes.setdefault(member.node, []).append(member)
        places.append(len(nodes[member.node]) - 1)
    following = _following(list(nodes), count, set(full))
    beside: dict[str, list[HostRecord]] = {}
    for host in others:
        if host.node not in nodes and host.node not in full:
            beside.setdefault(host.node, []).append(host)
    there, last = nodes | beside, list(beside)[:count]
    return [
        [there[node][place % len(there[node])] for node in [*following[member.node], *last][:count]]
        for member, place in zip(members, places, strict=True)
    ]


def _following(ring: list[str], count: int, full: Collection[str]) -> dict[str, list[str]]:
    """node -> the next ``count`` others in the ring that are not full."""
    free = [place for place, node in enumerate(ring) if node not in full]
    found = {}
    for here, node in enumerate(ring):
        first = bisect_right(free, here)
        around = (free[(first + step) % len(free)] for step in range(len(free)))
        found[node] = [ring[place] for place in itertools.islice((place for place in around if place != here), count)]
    return found


def order_members(hosts: list[HostRecord], wanted: int, tensor: int = 1, spread: int = 1) -> list[HostRecord]:
    """The ``wanted`` hosts that take part, in rank order: fullest nodes first, the hosts of a node side by side.

    A node gives a multiple of ``tensor`` hosts, so that the tensor ranks, which are numbered side by side, share it.
    The fewest nodes are used, but ``spread`` of them if there are as many, for copies of snapshots live on other nodes.
    """
    nodes: dict[str, list[HostRecord]] = {}
    for host in sorted(hosts, key=lambda host: host.number):
        nodes.setdefault(host.node, []).append(host)
    groups = [group[: len(group) // tensor * tensor] for group in nodes.values()]
    ordered = sorted(filter(None, groups), key=lambda group: (-len(group), group[0].number))
    ordered = ordered[: max(_nodes_needed(ordered, wanted), spread)]
    members: list[HostRecord] = []
    for place, group in enumerate(ordered):
        later = tensor * (len(ordered) - place - 1)  # at least one tensor group for each
        left = wanted - len(members)
        members += group[: max(left - later, min(left, tensor))]
    return members


def _nodes_needed(groups: list[list[HostRecord]], wanted: int) -> int:
    """How many of the first ``groups`` together have ``wanted`` hosts."""
    sizes = itertools.accumulate(len(group) for group in groups)
    return next((count for count, size in enumerate(sizes, 1) if size >= wanted), len(groups))
