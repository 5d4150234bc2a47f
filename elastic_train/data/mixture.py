"""Which source each place of training belongs to: a fixed table of slots, repeated in another arrangement each time.

A table has ``PERIOD`` places. Each source has as many of them as its weight says (largest remainder), so the shares are
exact over every whole table; which places those are is a keyed permutation, another one for each table. Tables begin
anew where a phase changes the weights. Nothing is stored: any place is found by building its table.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_train.data.order import SampleOrder

PERIOD = 1024
"""Places of a table."""


def shares(weights: Sequence[float], period: int = PERIOD) -> list[int]:
    """Places of each source in a table, by the method of the largest remainder; of equal ones the first source's.

    Exact: no rounding of floating point decides. Raises ValueError when a weight above 0 would get no place.
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * period / sum(exact) for weight in exact]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (counts[index] - quotas[index], index))
    for index in by_remainder[: period - sum(counts)]:
        counts[index] += 1
    for weight, count in zip(weights, counts, strict=True):
        if weight > 0 and count == 0:
            raise ValueError(f"weight {weight} of {float(sum(exact))} is less than one of {period} places")
    return counts


@dataclass(frozen=True, slots=True)
class Phase:
    """From global index ``start`` on, each source has ``counts`` places in a table.

    ``before``: samples of each source that were used before.
    """

    start: int
    counts: tuple[int, ...]
    before: tuple[int, ...]


class Mixture:
    """The source of every global index, and the how manieth sample of that source it is."""

    def __init__(self, weights: Sequence[tuple[int, Sequence[float]]], seed: int) -> None:
        """``weights``: (first global index, weight of each source) of each phase, rising; the first one is 0.

        Raises ValueError as ``shares``.
        """
        self._seed = seed
        self._table = lru_cache(maxsize=16)(self._make_table)
        self._phases: list[Phase] = []
        self._sources = len(weights[0][1])
        for start, given in weights:
            before = [self.used(source, start) for source in range(self._sources)] if start else [0] * self._sources
            self._phases.append(Phase(start, tuple(shares(given)), tuple(before)))
        self._starts = [phase.start for phase in self._phases]

    def locate(self, n: int) -> tuple[int, int]:
        """(source, its place in the order of that source's samples, from 0) at global index ``n`` >= 0."""
        if self._sources == 1:
            return 0, n
        number = bisect_right(self._starts, n) - 1
        phase = self._phases[number]
        table, place = divmod(n - phase.start, PERIOD)
        sources, ranks = self._table(number, table)
        source = int(sources[place])
        return source, phase.before[source] + table * phase.counts[source] + int(ranks[place])

    def used(self, source: int, n: int) -> int:
        """How many samples of ``source`` are at global indices below ``n``."""
        number = max(i for i, phase in enumerate(self._phases) if phase.start <= n)
        phase = self._phases[number]
        tables, places = divmod(n - phase.start, PERIOD)
        sources, _ = self._table(number, tables)
        rest = int(np.count_nonzero(sources[:places] == source))
        return phase.before[source] + tables * phase.counts[source] + rest

    def _make_table(self, phase: int, table: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The source of each place, and how many places before it in the table are the same source's."""
        counts = self._phases[phase].counts
        ordered = np.repeat(np.arange(len(counts)), counts)
        sources = ordered[_permutation(f"elastic_train mixture 1 {self._seed} {phase} {table}")]
        ranks = np.empty(PERIOD, np.int64)
        for source, count in enumerate(counts):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


def _permutation(key: str) -> np.ndarray[Any, Any]:
    """A keyed permutation of a table's places: their order by 64 bits that are a hash of key and place."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    x = np.arange(PERIOD, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(digest, "big"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


class MixedOrder:
    """The order of the samples of several sources. Ids are unique: a source's follow those of the sources before."""

    def __init__(self, mixture: Mixture, orders: Sequence[SampleOrder]) -> None:
        self._mixture = mixture
        self._orders = orders
        self._offsets = [0, *accumulate(order.num_samples for order in orders)]
        self.num_samples = self._offsets[-1]

    def sample_id(self, n: int) -> int:
        """The sample at global index ``n`` >= 0."""
        source, place = self._mixture.locate(n)
        return self._offsets[source] + self._orders[source].sample_id(place)

    def source_of(self, sample_id: int) -> tuple[int, int]:
        """(source, number of the sample in it) of an id."""
        source = bisect_right(self._offsets, sample_id) - 1
        return source, sample_id - self._offsets[source]
