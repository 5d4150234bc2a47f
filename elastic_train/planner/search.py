"""Which layouts of a job are fastest on so many accelerators, among those that fit their memory.

Exhaustive over ``planner.search_space`` up to bounds: nothing is looked at that cannot be faster than what was found,
even without state to exchange (``planner.search_bound``), or cannot fit, even without transients
(``planner.search_memory``). Each mesh (sizes of tp, pp, cp and of the data axis) is ranked once, with its best options.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.constraints import violated
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.host_memory import host_problem
from elastic_train.planner.memory import fullest_rank
from elastic_train.planner.ranking import HOST_MEMORY, MEMORY, SLOWER, Candidate, Ranking, Rejected
from elastic_train.planner.search_bound import Floor
from elastic_train.planner.search_fit import Fit
from elastic_train.planner.search_memory import MemoryFloor
from elastic_train.planner.search_options import Mesh, Schedule, Sharing
from elastic_train.planner.search_space import Space, space_of
from elastic_train.planner.step_time import step_time

SHOWN = 8
_TIGHT = 3
"""Where all meshes need more than this part of the limit by the quickest bound, it is asked first whether any fits."""
_EXAMPLES = 4
"""Meshes that do not fit of which one is shown: the one that misses by least."""


def rank_layouts(
    job: Job, gpus: int, accelerator: Accelerator, memory_limit: int | None = None, shown: int = SHOWN
) -> Ranking:
    """The ``shown`` fastest meshes of at most ``gpus`` accelerators, each with its best options.

    ``memory_limit``: bytes of one accelerator (default: all of its memory), which every term of ``planner.memory``, the
    slack among them, must fit into. Deterministic; of equally fast ones the one with fewer ranks wins, then smaller tp,
    pp and cp, then options in the order of ``planner.search_space``. ``best`` is empty if nothing fits:
    ``planner.impossible`` says why.
    """
    limit = accelerator.memory_for(gpus) if memory_limit is None else memory_limit
    return _Search(space_of(job, accelerator.per_node), accelerator, limit, shown).run(gpus)


Way = tuple[Schedule, int]
"""Schedule, micro-batch."""


@dataclass(slots=True)
class _Found:
    """What is known of a mesh."""

    best: Candidate | None = None
    sharings: list[Sharing] = field(default_factory=list)
    problem: tuple[str, str] | None = None
    """the first violated constraint, if nothing valid was seen"""
    too_big: bool = False
    """something needed too much memory"""
    as_big: int = 0
    """meshes with fewer data ranks that for that were not looked at"""
    slower: float = math.inf
    """seconds of the fastest that was too slow to be shown, whether it fits or not"""
    smallest_too_big: dict[tuple[Sharing, Schedule], int] = field(default_factory=dict)
    """micro-batches"""

    @property
    def seconds(self) -> float:
        """Of ``best``."""
        return math.inf if self.best is None else self.best.time.total


class _Search:
    """Best first: what has the lowest bound is looked at next, until the bound is above what is shown."""

    def __init__(self, space: Space, accelerator: Accelerator, limit: int, shown: int) -> None:
        self._space, self._accelerator, self._limit, self._shown = space, accelerator, limit, shown
        self._floor, self._memory = Floor(space, accelerator), MemoryFloor(space)
        self._fit = Fit(space, accelerator, limit, self._memory)
        self._narrows = accelerator.computing_at_once is None
        """whether a mesh with fewer data ranks never has a lower bound; ranks that share cores take less the fewer"""
        self._meshes: dict[Mesh, _Found] = {}
        self._queue: list[tuple[float, int, Mesh, Way | None]] = []
        """(bound in seconds, order of coming, mesh, one way to run it or all)"""
        self._together: dict[tuple[Schedule, str, bool, str, int], tuple[str, str] | None] = {}
        """the constraint against schedule, data, reshard_after_forward and recompute; None: they can go together"""
        self._pushed = 0
        self._looked_at = 0
        self._slowest = math.inf
        """seconds that a further mesh must beat"""

    def run(self, gpus: int) -> Ranking:
        for mesh in self._possible_meshes(gpus):
            self._push(self._floor.of(mesh), mesh, None)
            for narrower in iter(()) if self._narrows else self._space.narrower(mesh):
                self._push(self._floor.of(narrower), narrower, None)
        while self._queue and self._queue[0][0] <= self._slowest:
            floor, _, mesh, way = heapq.heappop(self._queue)
            if way is None:
                self._open(mesh)
                self._narrow(mesh)
            elif floor < self._meshes[mesh].seconds:
                self._run(mesh, way)
        answer = self._ranking()
        answer.certain = self._fit.patient
        for problem in self._space.forbidden(gpus):
            answer.reject(*problem)
        return answer

    def _possible_meshes(self, gpus: int) -> list[Mesh]:
        """The widest meshes but those that are known to need too much memory, whatever their data ranks."""
        least = {mesh: self._memory.outline(mesh, fewer=True) for mesh in self._space.widest(gpus)}
        possible = [mesh for mesh, size in least.items() if size <= self._limit]
        if min(least.values(), default=0) > self._limit / _TIGHT and not self._fit.some(possible):
            possible = []
        for mesh in sorted(least.keys() - set(possible)):
            self._meshes[mesh] = _Found(too_big=True, as_big=self._space.narrower_count(mesh))
        return possible

    def _push(self, floor: float, mesh: Mesh, way: Way | None) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (floor, self._pushed, mesh, way))

    def _narrow(self, mesh: Mesh) -> None:
        """Have it looked at with fewer data ranks, when its turn comes; but not where that cannot need less memory."""
        rest = self._space.narrower(mesh) if self._narrows else iter(())
        if self._meshes[mesh].too_big and self._memory.grows(mesh):
            fewer = list(rest)
            alone = [each for each in fewer if each.data_ranks * each.cp == 1]  # gathers nothing
            self._meshes[mesh].as_big = len(fewer) - len(alone)
            rest = iter(alone)
        if (narrower := next(rest, None)) is not None:
            self._push(self._floor.of(narrower), narrower, None)

    def _open(self, mesh: Mesh) -> None:
        self._meshes[mesh] = found = _Found()
        found.problem = violated(*self._space.easiest(mesh))
        if found.problem is not None:
            return
        if not self._memory.may_fit(mesh, self._limit):
            found.too_big = True
            return
        found.sharings = self._space.sharings(mesh)
        for way in self._space.ways(mesh):
            self._push(self._floor.of_way(mesh, *way), mesh, way)

    def _run(self, mesh: Mesh, way: Way) -> None:
        """Take the fastest way to share state, each with the first kind of recomputation that fits."""
        found = self._meshes[mesh]
        before = found.best
        for sharing in found.sharings:
            if found.best and self._floor.of_sharing(mesh, *way, sharing) >= min(found.seconds, self._slowest):
                continue
            for recompute in self._small(mesh, found, sharing, way):
                # Kinds that follow take no less time.
                if self._settles(found, *self._space.question(mesh, sharing, *way, recompute)):
                    break
        if found.best is not before:
            times = heapq.nsmallest(self._shown, (each.seconds for each in self._meshes.values()))
            self._slowest = times[-1] if len(times) == self._shown else math.inf

    def _possible(self, found: _Found, mesh: Mesh, sharing: Sharing, schedule: Schedule, recompute: str) -> bool:
        """Whether these options can go together at all: in a pipeline of two ranks, as larger axes add constraints."""
        if mesh.pp == 1:
            return True
        ranks = min(mesh.data_ranks, 2)
        key = (schedule, sharing.data, sharing.reshard_after_forward, recompute, ranks)
        if key not in self._together:
            replicas, shards = (ranks, 1) if sharing.data == "ddp" else (1, ranks)
            question = (Mesh(1, 2, 1, ranks), replace(sharing, dp_replicate=replicas, dp_shard=shards), schedule)
            asked = (
                violated(*self._space.question(*question, size, recompute)) for size in self._space.micro_batches()
            )
            problem = next(asked)
            while problem is not None and (other := next(asked, problem)) is not problem:
                problem = other
            self._together[key] = problem
        found.problem = found.problem or self._together[key]
        return self._together[key] is None

    def _small(self, mesh: Mesh, found: _Found, sharing: Sharing, way: Way) -> Iterator[str]:
        """Kinds of recomputation that may fit; with larger micro-batches none does that did not before."""
        schedule, micro_batch = way
        if micro_batch > found.smallest_too_big.get((sharing, schedule), math.inf):
            return
        asked, fits = False, False
        for recompute in self._space.recomputes():
            if self._possible(found, mesh, sharing, schedule, recompute):
                asked = True
                if self._memory.of(mesh, (sharing, schedule, micro_batch, recompute)) <= self._limit:
                    fits = True
                    yield recompute
        if asked and not fits:
            found.smallest_too_big[sharing, schedule] = micro_batch
            found.too_big = True

    def _settles(self, found: _Found, job: Job, layout: Layout) -> bool:
        """Whether more recomputation is not worth a look. Keeps what is fastest."""
        if (problem := violated(job, layout)) is not None:
            found.problem = found.problem or problem
            return False
        self._looked_at += 1
        fullest = None
        if found.seconds == self._slowest == math.inf:
            # No time could rule it out.
            fullest = fullest_rank(job, layout)
            if fullest.total > self._limit:
                found.too_big = True
                return False
        time = step_time(job, layout, self._accelerator)
        if time.total >= found.seconds:
            return True
        if time.total > self._slowest:
            found.slower = min(found.slower, time.total)
            return True
        fullest = fullest or fullest_rank(job, layout)
        if fullest.total > self._limit:
            found.too_big = True
            return False
        if (needed := host_problem(job, layout, self._accelerator)) is not None:
            found.problem = (HOST_MEMORY, needed)
            return True
        found.best = Candidate(job, layout, fullest, time)
        return True

    def _ranking(self) -> Ranking:
        ranked = sorted(
            (found.best.time.total, mesh.world_size, mesh) for mesh, found in self._meshes.items() if found.best
        )
        shown = {mesh for _, _, mesh in ranked[: self._shown]}
        best = [self._meshes[mesh].best for _, _, mesh in ranked[: self._shown]]
        answer = Ranking([plan for plan in best if plan is not None], {}, self._looked_at)
        waiting = {mesh: floor for floor, _, mesh, _ in sorted(self._queue, key=lambda entry: entry[:2], reverse=True)}
        unseen = {mesh: self._unseen(mesh) for mesh in waiting if mesh not in self._meshes}
        too_big = []
        for mesh in dict.fromkeys([*self._meshes, *waiting]):
            found = self._meshes.get(mesh, _Found())
            if mesh in shown:
                continue
            if found.best is not None:
                seconds = found.best.time.total
                answer.reject(SLOWER, f"{found.best.layout} takes {seconds:.4g} s a step", seconds)
            elif (least := min(waiting.get(mesh, math.inf), found.slower)) < math.inf:
                answer.reject(SLOWER, f"{mesh} takes at least {least:.4g} s a step", least, 1 + unseen.get(mesh, 0))
            elif found.problem is not None and (found.problem[0] == HOST_MEMORY or not found.too_big):
                answer.reject(*found.problem)
            else:
                too_big.append(mesh)
        self._tell_memory(answer, too_big)
        return answer

    def _unseen(self, mesh: Mesh) -> int:
        """Meshes with fewer data ranks than one that was not looked at, and so were not even asked for."""
        return self._space.narrower_count(mesh) if self._narrows else 0

    def _tell_memory(self, answer: Ranking, too_big: list[Mesh]) -> None:
        """Only those are looked at for an example that by the bound miss by least."""
        for mesh in heapq.nsmallest(
            _EXAMPLES, too_big, key=lambda mesh: (self._memory.outline(mesh, fewer=True), mesh)
        ):
            if (held := self._fit.leanest(mesh)) is not None:
                answer.reject(MEMORY, held.too_much(self._limit), held.fullest.total)
        if too_big:
            answer.rejected.setdefault(MEMORY, Rejected(MEMORY)).count = sum(
                1 + self._meshes[mesh].as_big for mesh in too_big
            )
