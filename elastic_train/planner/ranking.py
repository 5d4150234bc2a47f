"""The answer to a search: the fastest layouts, and what was ruled out by which limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elastic_train.planner.held import Held
from elastic_train.planner.step_time import StepTime

MEMORY, HOST_MEMORY, SLOWER = "memory", "host memory", "slower"


@dataclass(frozen=True, slots=True)
class Candidate(Held):
    """What a layout with its options holds, and how long its step takes."""

    time: StepTime


@dataclass(slots=True)
class Rejected:
    """Meshes (of violated constraints: sizes of an axis) that one limit rules out, and the one nearest to it."""

    limit: str
    """``memory``, ``host memory``, ``slower`` (cannot be among those shown) or the field of a violated constraint"""
    count: int = 0
    example: str = ""
    excess: float = math.inf


@dataclass(slots=True)
class Ranking:
    """The answer to a search: fastest first."""

    best: list[Candidate] = field(default_factory=list)
    rejected: dict[str, Rejected] = field(default_factory=dict)
    looked_at: int = 0
    """combinations whose time or memory was added up"""
    certain: bool = True
    """that there is nothing else: False where nothing was found before patience ended"""

    def reject(self, limit: str, example: str, excess: float = 0.0, count: int = 1) -> None:
        entry = self.rejected.setdefault(limit, Rejected(limit))
        entry.count += count
        if excess < entry.excess:
            entry.example, entry.excess = example, excess
