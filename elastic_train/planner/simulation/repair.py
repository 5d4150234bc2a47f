"""How long a lost node is away: always as long, or drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

_LEAST = 1e-12
"""of a quantile: the logarithm of 0 is none"""


class Shape(StrEnum):
    """Of the distribution."""

    FIXED = "fixed"
    EXPONENTIAL = "exponential"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Repair:
    """From a node's failure or notice until another one is there.

    Lognormal is what fits repair times of large clusters best: Schroeder and Gibson, "A large-scale study of failures
    in high-performance computing systems", DSN 2006, section 6.

    Attributes:
        mean: seconds; inf: none ever comes.
        sigma: standard deviation of the logarithm, of ``lognormal`` alone.
    """

    mean: float
    shape: Shape = Shape.FIXED
    sigma: float = 0.0

    def seconds(self, part: float) -> float:
        """The quantile ``part`` in [0, 1): a failure that draws its part keeps it whatever the distribution is."""
        if self.shape is Shape.FIXED:
            return self.mean
        if self.shape is Shape.EXPONENTIAL:
            return -self.mean * math.log1p(-part)
        normal = NormalDist().inv_cdf(max(part, _LEAST))
        return self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)
