"""When what fails: failures of every node, drawn anew for each run, or a trace. The job does not change them.

A node's place in the cluster keeps its own stream of chance, so runs with other spares or intervals meet the same
failures (common random numbers).
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_train.config.faults import LLAMA3_FAILURES, Fault, Interruption, Kind


class UnknownFailures(ValueError):
    """No such distribution or rate; the sentence says what would do."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``node``: the number of its place, or None when ``pick`` in [0, 1) chooses among those that there are.

    Attributes:
        seconds: of a partition, or the notice of a drain.
        repair: the node goes away until it is repaired.
        beside: places that are lost at the same moment.
        part: in [0, 1): how long the repair takes among others (``Repair.seconds``).
        away: seconds that it takes, where a trace says so.
    """

    at: float
    kind: Kind
    pick: float
    node: int | None = None
    seconds: float = 0.0
    repair: bool = False
    beside: tuple[int, ...] = ()
    part: float = 0.5
    away: float | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of the time between two failures of a node: Weibull of ``shape``; 1 is exponential.

    Nodes are of random age when a run begins (a renewal process in equilibrium), so the rate is 1 / mean all the time.
    Real ones have 0.7 to 0.8: Schroeder and Gibson, "A large-scale study of failures in high-performance computing
    systems", DSN 2006.
    """

    shape: float = 1.0

    def gap(self, mean: float, chance: random.Random) -> float:
        """Seconds between two."""
        if self.shape == 1.0:
            return chance.expovariate(1 / mean)
        return chance.weibullvariate(self._scale(mean), self.shape)

    def first(self, mean: float, chance: random.Random) -> float:
        """Seconds until the first one: a uniform part of an interval that is the likelier met the longer it is."""
        if self.shape == 1.0:
            return chance.expovariate(1 / mean)
        length: float = self._scale(mean) * chance.gammavariate(1 + 1 / self.shape, 1.0) ** (1 / self.shape)
        return length * chance.random()

    def _scale(self, mean: float) -> float:
        return mean / math.gamma(1 + 1 / self.shape)


def distribution(text: str) -> Distribution:
    """``exponential`` or ``weibull:SHAPE``. Raises UnknownFailures."""
    if text == "exponential":
        return Distribution()
    match = re.fullmatch(r"weibull:(\d+(?:\.\d+)?)", text)
    shape = float(match[1]) if match else 0.0
    if not 0.1 <= shape <= 20:
        raise UnknownFailures(
            f"failures={text!r}: must be exponential, weibull:SHAPE with a shape from 0.1 to 20, or a file of faults"
        )
    return Distribution(shape)


def rate(text: str) -> float:
    """Events per second of ``0.05/h`` or ``1/d``. Raises UnknownFailures."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)/([mhd])", text)
    if match is None:
        raise UnknownFailures(f"spot={text!r} is no rate; write reclaims per node as 0.05/h or 1/d")
    return float(match[1]) / {"m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


@dataclass(frozen=True, slots=True)
class Failures:
    """Where failures come from; every source is independent of the others.

    Attributes:
        mtbf: of one node, seconds; inf: none of its own.
        mix: what they are, by their counts.
        rack_nodes, rack_mtbf: so many neighbours are lost together (a switch, a power feed) once per that time.
        spot: a cloud takes a node back so often per second; ``notice``: seconds, also before maintenance.
        trace: these instead of all that.
    """

    mtbf: float = math.inf
    distribution: Distribution = Distribution()
    mix: tuple[Interruption, ...] = tuple(LLAMA3_FAILURES.values())
    rack_nodes: int = 0
    rack_mtbf: float = math.inf
    spot: float = 0.0
    notice: float = 120.0
    trace: tuple[Failure, ...] | None = None

    def expected(self, nodes: int, duration: float) -> float:
        """Mean number of failures of one run on ``nodes`` places."""
        if self.trace is not None:
            return len(self.trace)
        racks = math.ceil(nodes / self.rack_nodes) / self.rack_mtbf if self.rack_nodes else 0.0
        return duration * (nodes * (1 / self.mtbf + self.spot) + racks)

    def draw(self, nodes: int, duration: float, seed: int) -> list[Failure]:
        """Those of one run on ``nodes`` places, in the order of time."""
        if self.trace is not None:
            return [failure for failure in self.trace if failure.at < duration]
        drawn: list[Failure] = []
        for node in range(nodes):
            if self.mtbf < math.inf:
                drawn += self._own(node, duration, f"{seed}/{node}/own")
            if self.spot > 0:
                drawn += self._reclaims(node, duration, f"{seed}/{node}/spot")
        if self.rack_nodes and self.rack_mtbf < math.inf:
            for first in range(0, nodes, self.rack_nodes):
                members = range(first, min(first + self.rack_nodes, nodes))
                drawn += self._rack(members, duration, f"{seed}/{first}/rack")
        return sorted(drawn, key=lambda failure: failure.at)

    def _own(self, node: int, duration: float, stream: str) -> Iterator[Failure]:
        weights = list(itertools.accumulate(each.count for each in self.mix))
        chance, parts = random.Random(stream), _parts(stream)
        at = self.distribution.first(self.mtbf, chance)
        while at < duration:
            (cause,) = chance.choices(self.mix, cum_weights=weights)
            seconds = self.notice if cause.kind == Kind.DRAIN else 0.0
            yield Failure(at, cause.kind, chance.random(), node, seconds, repair=cause.repair, part=next(parts))
            at += self.distribution.gap(self.mtbf, chance)

    def _reclaims(self, node: int, duration: float, stream: str) -> Iterator[Failure]:
        chance, parts = random.Random(stream), _parts(stream)
        at = chance.expovariate(self.spot)
        while at < duration:
            yield Failure(at, Kind.DRAIN, chance.random(), node, seconds=self.notice, part=next(parts))
            at += chance.expovariate(self.spot)

    def _rack(self, members: Sequence[int], duration: float, stream: str) -> Iterator[Failure]:
        chance, parts = random.Random(stream), _parts(stream)
        at = chance.expovariate(1 / self.rack_mtbf)
        while at < duration:
            yield Failure(at, Kind.KILL_NODE, 0.0, members[0], beside=tuple(members[1:]), part=next(parts))
            at += chance.expovariate(1 / self.rack_mtbf)


def _parts(stream: str) -> Iterator[float]:
    """From a stream of their own, so that failures are the same whether their repairs are drawn or not."""
    chance = random.Random(f"{stream}/repair")
    while True:
        yield chance.random()


def traced(faults: Sequence[Fault], places: Mapping[str, int] | None = None, seed: int = 1) -> tuple[Failure, ...]:
    """The faults of a trace. What has no ``away`` is as chaos breaks it, whole again.

    Args:
        places: of the nodes that the trace names; of others ``pick`` chooses.
    """
    parts, places = _parts(f"{seed}/trace"), places or {}
    return tuple(
        Failure(
            fault.at,
            fault.kind,
            fault.pick,
            None if fault.node is None else places.get(fault.node),
            fault.seconds,
            repair=fault.away is not None,
            part=next(parts),
            away=fault.away,
        )
        for fault in faults
    )


def placed(faults: Sequence[Fault], nodes: int, spares: int, seed: int) -> dict[str, int]:
    """A place for each node that the faults name, by chance: among those of the job, of too many also of the spares.

    Raises UnknownFailures when there are more names than places.
    """
    names = sorted({fault.node for fault in faults if fault.node is not None})
    if len(names) > nodes + spares:
        raise UnknownFailures(
            f"nodes={nodes}: the trace names {len(names)} nodes, so give at least {len(names)}, spares included"
        )
    among = nodes if len(names) <= nodes else nodes + spares
    return dict(zip(names, random.Random(f"{seed}/places").sample(range(among), len(names)), strict=True))
