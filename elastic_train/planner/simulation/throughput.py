"""How many hosts a job uses of those that are left, and how fast it is then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from elastic_train.config.job import Job
from elastic_train.planner.layouts import NoLayout, choose_layout


class Share(NamedTuple):
    """Of the hosts that are there, relative to the full job: how fast it is, and how fast the planner takes it for."""

    hosts: int
    speed: float
    planned: float | None = None
    """None: as fast as it is"""

    @property
    def estimate(self) -> float:
        """By which it is decided whether hosts that come are taken in."""
        return self.speed if self.planned is None else self.planned


Hosts = Mapping[int, int]
"""Hosts on a node -> nodes with so many."""
Throughput = Callable[[Hosts], Share | None]
"""None: with so few the job waits."""


def proportional(full: int, least: int = 1, unit: int = 1) -> Throughput:
    """As fast as the share of ``full`` hosts that it has, in whole ``unit``s: the hosts of one replica of the model.

    With fewer than ``least`` the job waits. That the slowdown is in proportion assumes a global batch that is divided
    evenly and exchanges that cost the same share of a step.
    """

    def share(hosts: Hosts) -> Share | None:
        used = min(sum(each * count for each, count in hosts.items()), full) // unit * unit
        return Share(used, used / full) if used >= max(least, unit) else None

    return share


def planned(job: Job, full: Hosts) -> Throughput:
    """As the planner would lay ``job`` out again on no more hosts than those of ``full``, with its estimates.

    Raises NoLayout if ``full`` has none.
    """
    most = min(job.hosts.max, sum(each * count for each, count in full.items()))
    best = choose_layout(job, _nodes(full), most)
    known: dict[tuple[tuple[int, int], ...], Share | None] = {}

    def share(hosts: Hosts) -> Share | None:
        key = tuple(sorted(hosts.items()))
        if key not in known:
            known[key] = _planned(job, hosts, most, best.cost)
        return known[key]

    return share


def _planned(job: Job, hosts: Hosts, most: int, full_cost: float) -> Share | None:
    if sum(each * count for each, count in hosts.items()) < job.hosts.min:
        return None
    try:
        choice = choose_layout(job, _nodes(hosts), most)
    except NoLayout:
        return None
    return Share(choice.used_hosts, full_cost / choice.cost)


def _nodes(hosts: Hosts) -> list[int]:
    return sorted((each for each, count in hosts.items() for _ in range(count)), reverse=True)
