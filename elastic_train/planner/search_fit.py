"""Which meshes fit, and how few accelerators would do: bounds first, then the options that by them need least."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_train.planner.constraints import violated
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.held import Held
from elastic_train.planner.host_memory import PROCESS, host_problem
from elastic_train.planner.memory import fullest_rank
from elastic_train.planner.search_memory import MemoryFloor
from elastic_train.planner.search_options import Mesh
from elastic_train.planner.search_space import Space

MOST_GPUS = 1 << 20
"""No answer is looked for beyond."""
_LOOKS = 4
"""Of the options that need least by the bound so many are looked at, to find those that need least."""
_PATIENCE = 400
"""Meshes that fit by the quickest bound, looked at for one answer: it then comes after some two seconds."""


@dataclass(frozen=True, slots=True)
class Fewest:
    """``count``: accelerators that would do, None if none were found; ``certain``: that no fewer would."""

    count: int | None
    certain: bool


class Fit:
    """Meshes of one space against ``limit`` bytes of each of ``chip``, and the CPU memory of its nodes."""

    def __init__(self, space: Space, chip: Accelerator, limit: int, floor: MemoryFloor | None = None) -> None:
        self._space, self._chip, self._limit, self._floor = space, chip, limit, floor or MemoryFloor(space)
        self.looked_at = 0
        """meshes whose options were looked at one by one"""

    @property
    def patient(self) -> bool:
        return self.looked_at < _PATIENCE

    def leanest(self, mesh: Mesh) -> Held | None:
        """The options that need least; None if none are valid."""
        ways = sorted(self._floor.lean(mesh), key=lambda way: self._floor.of(mesh, way))
        questions = (self._space.question(mesh, *way) for way in ways)
        valid = itertools.islice((question for question in questions if violated(*question) is None), _LOOKS)
        found = [Held(job, layout, fullest_rank(job, layout)) for job, layout in valid]
        return min(found, key=lambda held: held.fullest.total, default=None)

    def fits(self, mesh: Mesh) -> bool:
        """Whether some options fit."""
        if self._floor.outline(mesh) > self._limit or violated(*self._space.easiest(mesh)) is not None:
            return False
        self.looked_at += 1
        ways = sorted((self._floor.of(mesh, way), order, way) for order, way in enumerate(self._floor.lean(mesh)))
        questions = (self._space.question(mesh, *way) for least, _, way in ways if least <= self._limit)
        asked = itertools.islice((question for question in questions if violated(*question) is None), _LOOKS)
        held = (question for question in asked if host_problem(*question, self._chip) is None)
        return any(fullest_rank(*question).total <= self._limit for question in held)

    def some(self, widest: Sequence[Mesh]) -> bool:
        """Whether any of these fits, or one with fewer data ranks; False, too, where patience ends before one is found.

        Those that by the bound need least come first.
        """
        for _, mesh in sorted((self._floor.outline(mesh, fewer=True), mesh) for mesh in widest):
            if not self.patient:
                return False
            if any(self.fits(replace(mesh, data_ranks=ranks)) for ranks in self._ends(mesh)):
                return True
        return False

    def first(self, gpus: int) -> Held | None:
        """What fits of the smallest tp, then pp and cp, on at most ``gpus``; None if nothing was found."""
        for widest in sorted(self._space.widest(gpus)):
            if self._floor.outline(widest, fewer=True) <= self._limit and self.patient:
                for ranks in self._ends(widest):
                    if self.fits(mesh := replace(widest, data_ranks=ranks)):
                        return self.leanest(mesh)
        return None

    def fewest(self) -> Fewest:
        """The fewest accelerators that something fits on, up to ``MOST_GPUS``."""
        if self._space.job.parallel.offload and self._chip.host_memory_bytes < PROCESS:
            return Fewest(None, certain=True)
        found = MOST_GPUS + 1
        for widest in sorted(self._space.widest(MOST_GPUS), key=lambda mesh: mesh.world_size // mesh.data_ranks):
            if self._floor.outline(widest, fewer=True) <= self._limit:
                for span in self._spans(widest):
                    found = self._fewest_of(widest, span, found)
            if not self.patient:
                break
        return Fewest(found if found <= MOST_GPUS else None, self.patient)

    def _fewest_of(self, widest: Mesh, span: range, most: int) -> int:
        """Accelerators that some data ranks of ``span`` need, if those are fewer than ``most``."""

        def needed(ranks: int) -> int:
            return _accelerators(replace(widest, data_ranks=ranks), self._space.per_node)

        def fits(ranks: int) -> bool:
            return self.fits(replace(widest, data_ranks=ranks))

        room = bisect.bisect_left(span, most, key=needed)
        if not room or not fits(span[room - 1]):
            return most
        return needed(span[bisect.bisect_left(span, True, hi=room - 1, key=fits)])

    def _ends(self, widest: Mesh) -> list[int]:
        """Data ranks, of which some fit if any do."""
        return sorted({end for span in self._spans(widest) for end in (span[0], span[-1])})

    def _spans(self, widest: Mesh) -> list[range]:
        """Numbers of data ranks of which, in each, more never need more memory.

        One alone gathers nothing; where there are fewer micro-batches than stages, only ``gpipe`` runs.
        """
        unit, most = self._space.unit, widest.data_ranks
        if self._space.cuts_vary:
            numbers = {most, *(mesh.data_ranks for mesh in self._space.narrower(widest))}
            return [range(number, number + 1) for number in sorted(numbers)]
        starts = {unit if self._space.varies else most}
        if self._space.varies and widest.cp * unit == 1:
            starts.add(2)
        if self._space.varies and widest.pp > 1:
            starts.add(((self._space.slots - 1) // (widest.pp - 1) // unit + 1) * unit)
        begins = sorted(start for start in starts if start <= most)
        return [range(begin, end, unit) for begin, end in itertools.pairwise([*begins, most + 1])]


def _accelerators(mesh: Mesh, per_node: int) -> int:
    """That hold the mesh, tensor ranks together on nodes of ``per_node``."""
    groups, each = mesh.world_size // mesh.tp, per_node // mesh.tp
    nodes, rest = divmod(groups - 1, each)
    return nodes * per_node + (rest + 1) * mesh.tp
