"""Which numbers of data ranks are worth a look: what a step takes goes with the micro-batches that each has to run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache


def equal_spans(slots: int, most: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """(fewest, most) data ranks of each number of micro-batches, multiples of ``unit`` up to ``most``, falling.

    All of a span run ``ceil(slots / data ranks)`` micro-batches. Of none more than ``slots``.
    """
    last = min(most, slots) // unit
    while last > 0:
        count = -(-slots // (last * unit))
        first = -(-slots // (count * unit))
        yield first * unit, last * unit
        last = first - 1


@lru_cache(maxsize=1 << 12)
def worth_a_look(slots: int, most: int, unit: int = 1) -> tuple[int, ...]:
    """The ends of every span, falling: the fewest leave most of the others idle, the most need least memory."""
    return tuple(dict.fromkeys(ranks for first, last in equal_spans(slots, most, unit) for ranks in (last, first)))
