"""When what fails: failures of every node, drawn anew for each run, or a trace. The job does not change them.

A node's place in the cluster keeps its own stream of chance, so runs with other spares or intervals meet the same
failures (common random numbers).
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic_train.config.faults import LLAMA3_FAILURES, Fault, Interruption, Kind


class UnknownFailures(ValueError):
    """No such distribution or rate; the sentence says what would do."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``node``: the number of its place, or None when ``pick`` in [0, 1) chooses among those that there are.

    ``seconds``: of a partition, or the notice of a drain. ``repair``: the node goes away until it is repaired.
    ``beside``: places that are lost at the same moment.
    """

    at: float
    kind: Kind
    pick: float
    node: int | None = None
    seconds: float = 0.0
    repair: bool = False
    beside: tuple[int, ...] = ()


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
            chance = random.Random(f"{seed}/{node}/own")
            if self.mtbf < math.inf:
                drawn += self._own(node, duration, chance)
            if self.spot > 0:
                chance = random.Random(f"{seed}/{node}/spot")
                drawn += self._reclaims(node, duration, chance)
        if self.rack_nodes and self.rack_mtbf < math.inf:
            for first in range(0, nodes, self.rack_nodes):
                chance = random.Random(f"{seed}/{first}/rack")
                drawn += self._rack(range(first, min(first + self.rack_nodes, nodes)), duration, chance)
        return sorted(drawn, key=lambda failure: failure.at)

    def _own(self, node: int, duration: float, chance: random.Random) -> Iterator[Failure]:
        weights = list(itertools.accumulate(each.count for each in self.mix))
        at = self.distribution.first(self.mtbf, chance)
        while at < duration:
            (cause,) = chance.choices(self.mix, cum_weights=weights)
            seconds = self.notice if cause.kind == Kind.DRAIN else 0.0
            yield Failure(at, cause.kind, chance.random(), node, seconds, repair=cause.repair)
            at += self.distribution.gap(self.mtbf, chance)

    def _reclaims(self, node: int, duration: float, chance: random.Random) -> Iterator[Failure]:
        at = chance.expovariate(self.spot)
        while at < duration:
            yield Failure(at, Kind.DRAIN, chance.random(), node, seconds=self.notice)
            at += chance.expovariate(self.spot)

    def _rack(self, members: Sequence[int], duration: float, chance: random.Random) -> Iterator[Failure]:
        at = chance.expovariate(1 / self.rack_mtbf)
        while at < duration:
            yield Failure(at, Kind.KILL_NODE, 0.0, members[0], beside=tuple(members[1:]))
            at += chance.expovariate(1 / self.rack_mtbf)


def traced(faults: Sequence[Fault]) -> tuple[Failure, ...]:
    """A trace as chaos takes it. What chaos breaks is whole again."""
    return tuple(Failure(fault.at, fault.kind, fault.pick, seconds=fault.seconds) for fault in faults)
