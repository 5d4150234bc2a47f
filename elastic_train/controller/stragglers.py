"""Hosts that stay slower than their peers: found by what each step really took of a trainer's own time.

All ranks of a step end it together, so wall time tells nothing. A trainer's own time is that in which its thread ran or
was ready to run and got no CPU: a busy machine, a CPU quota and a low priority show, waiting for other ranks does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from elastic_train.config.layout import Layout
from elastic_train.config.operation import FailureConfig
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.members import order_members
from elastic_train.controller.trouble import Trouble

_QUARTERS = 4

Own = tuple[float, float]
"""Seconds of one step: own time, and how much of it was waiting for a CPU."""


class StragglerJudge:
    """Judges the steps of one generation.

    Slow is who needed more than ``factor`` times the median of its peers in each of four quarters of ``steps`` steps,
    one after the other: not once, however long, but again and again.
    """

    def __init__(self, layout: Layout, factor: float, steps: int) -> None:
        self._factor, self._quarter, self._world = factor, -(-steps // _QUARTERS), layout.world_size
        stages: dict[int, list[int]] = {}
        for rank in range(self._world):
            stages.setdefault(layout.coordinates(rank).pp, []).append(rank)
        self._by_work = all(len(ranks) > 1 for ranks in stages.values())
        """peers have the same work, else only how long they waited for a CPU can be compared"""
        self._groups = list(stages.values()) if self._by_work else [list(range(self._world))]
        self._slow: dict[int, list[float]] = {}
        """rank -> how many times slower it was in each of the last quarters"""
        self._begin()

    def _begin(self) -> None:
        self._steps, self._own, self._waiting = 0, [0.0] * self._world, [0.0] * self._world

    def step(self, own: list[Own]) -> tuple[int, float] | None:
        """``own``: of a step, by rank. The slowest rank, if it is one, and how many times slower it was at least."""
        for rank, (seconds, waiting) in enumerate(own):
            self._own[rank] += seconds
            self._waiting[rank] += waiting
        self._steps += 1
        if self._steps < self._quarter:
            return None
        slow = {rank: ratio for group in self._groups for rank, ratio in self._ratios(group) if ratio > self._factor}
        self._slow = {rank: [*self._slow.get(rank, []), ratio][-_QUARTERS:] for rank, ratio in slow.items()}
        self._begin()
        found = [(min(ratios), rank) for rank, ratios in self._slow.items() if len(ratios) == _QUARTERS]
        return (max(found)[1], max(found)[0]) if found else None

    def _ratios(self, group: list[int]) -> Iterator[tuple[int, float]]:
        """Each rank's cost in a quarter, as a multiple of the median of the others'."""
        costs = [self._cost(rank) for rank in group]
        ordered = sorted(costs)
        for rank, cost in zip(group, costs, strict=True):
            usual = _median_without(ordered, bisect_left(ordered, cost))
            yield rank, cost / usual if usual > 0 else 0.0

    def _cost(self, rank: int) -> float:
        own, waiting = self._own[rank], self._waiting[rank]
        if self._by_work:
            return own
        return own / (own - waiting) if own > waiting else 0.0


def _median_without(ordered: list[float], place: int) -> float:
    """Of all but the one at ``place``; 0 when there is no other."""
    count = len(ordered) - 1
    if count == 0:
        return 0.0
    low, high = ((middle + (middle >= place)) for middle in ((count - 1) // 2, count // 2))
    return (ordered[low] + ordered[high]) / 2


class Stragglers:
    """Names and replaces the slow hosts of a job.

    Args:
        usable: the hosts that may be members of a generation.
        partners: copies of a snapshot on other nodes.
        record: writes an event to the ledger.
    """

    def __init__(
        self,
        failure: FailureConfig,
        partners: int,
        usable: Callable[[], list[HostRecord]],
        record: Callable[..., None],
    ) -> None:
        self._failure, self._spread, self._usable, self._record = failure, 1 + partners, usable, record
        self._generation = 0
        self._judge: StragglerJudge | None = None
        self._named: set[int] = set()
        """ranks of the generation"""

    def look(self, generation: Generation, step: int) -> Trouble | None:
        """All ranks have done ``step``. What to form a new generation for, if a slow member is to be replaced."""
        failure, said = self._failure, generation.stepped[step]
        if failure.straggler == "off" or generation.layout.world_size == 1:
            return None
        if self._judge is None or generation.number != self._generation:
            self._generation, self._named = generation.number, set()
            self._judge = StragglerJudge(generation.layout, failure.straggler_factor, failure.straggler_steps)
            return None  # the first step of a generation also builds things
        found = self._judge.step([(said[rank]["own_seconds"], said[rank]["cpu_wait_seconds"]) for rank in sorted(said)])
        return None if found is None else self._found(generation, step, *found)

    def _found(self, generation: Generation, step: int, rank: int, factor: float) -> Trouble | None:
        host, layout = generation.members[rank], generation.layout
        others = [other for other in self._usable() if not other.doubtful and other is not host]
        replaced = self._failure.straggler == "replace" and self._fill(others, layout)
        if rank in self._named and not replaced:
            return None
        self._named.add(rank)
        place = {"rank": rank, "host": host.number, "node": host.node}
        steps = self._failure.straggler_steps
        self._record("straggler", step=step, **place, factor=round(factor, 2), steps=steps, replaced=replaced)
        host.slow = replaced
        detail = f"rank {rank} on {host.label} was at least {factor:.1f} times slower than its peers for {steps} steps"
        return Trouble("straggler", detail) if replaced else None

    def candidates(self, layout: Layout) -> list[HostRecord]:
        """Who may be a member: slow hosts only if ``layout`` cannot do without them, suspects only if not even then."""
        usable = self._usable()
        trusted = [host for host in usable if not host.suspected]
        fast = [host for host in trusted if not host.slow]
        fewer = (hosts for hosts in (fast, trusted) if len(hosts) < len(usable) and self._fill(hosts, layout))
        return next(fewer, usable)

    def _fill(self, hosts: list[HostRecord], layout: Layout) -> bool:
        return len(order_members(hosts, layout.world_size, layout.tp, self._spread)) == layout.world_size
