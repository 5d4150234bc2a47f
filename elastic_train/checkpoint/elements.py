"""How far two arrays of saved elements are apart, from their bits: numpy has no bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SLICE = 2**18
"""Elements looked at at once, so that float64 copies stay small."""

Bits = npt.NDArray[np.unsignedinteger[Any]]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """``differing`` elements have not the same bits. ``absolute``: the largest ``|a - b|`` of them; ``relative``: the
    largest ``|a - b| / max(|a|, |b|)``. NaN where one of the two is NaN; None for a dtype that numpy cannot read.
    """

    differing: int = 0
    absolute: float | None = 0.0
    relative: float | None = 0.0

    def joined(self, other: Difference) -> Difference:
        """Of both parts together."""
        return Difference(
            self.differing + other.differing,
            _larger(self.absolute, other.absolute),
            _larger(self.relative, other.relative),
        )


def difference(left: Bits, right: Bits, dtype: str) -> Difference:
    """Of arrays of one shape, an unsigned integer per element; ``dtype`` is torch's name of what the bits mean."""
    ours, theirs = left.reshape(-1), right.reshape(-1)
    found = Difference()
    for begin in range(0, len(ours), SLICE):
        a, b = ours[begin : begin + SLICE], theirs[begin : begin + SLICE]
        unequal = a != b
        count = int(np.count_nonzero(unequal))
        if count:
            found = found.joined(Difference(count, *_distances(a[unequal], b[unequal], dtype)))
    return found


def _distances(a: Bits, b: Bits, dtype: str) -> tuple[float | None, float | None]:
    if dtype not in _READERS:
        return None, None
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        x, y = _READERS[dtype](a), _READERS[dtype](b)
        apart = np.abs(x - y)
        if dtype == "int64":  # float64 would round neighbours beyond 2**53 together
            high, low = np.maximum(a.view(np.int64), b.view(np.int64)), np.minimum(a.view(np.int64), b.view(np.int64))
            apart = (high.view(np.uint64) - low.view(np.uint64)).astype(np.float64)
        scale = np.maximum(np.abs(x), np.abs(y))
        relative = np.where(apart == 0, 0.0, apart / scale)
    return float(apart.max()), float(relative.max())


def _bfloat16(bits: Bits) -> Values:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _as(name: str) -> Any:
    return lambda bits: bits.view(name).astype(np.float64)


_READERS = {name: _as(name) for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")}
_READERS |= {"bfloat16": _bfloat16, "bool": _as("uint8")}


def _larger(a: float | None, b: float | None) -> float | None:
    """The larger of both, NaN when one is; None when one is not known."""
    return None if a is None or b is None else float(np.maximum(a, b))
