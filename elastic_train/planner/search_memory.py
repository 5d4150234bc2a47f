"""How much memory the options of a mesh need at least: what a search need not look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32, block_bytes, loss_bytes
from elastic_train.planner.constraints import equal_rounds, violated
from elastic_train.planner.memory import RUNTIME, SLACK, SLACK_LIMIT, RankMemory, fullest_rank
from elastic_train.planner.model_state import division, model_state, moments_of, numbers_of
from elastic_train.planner.parameters import StageParameters, stages_of_ranks
from elastic_train.planner.schedule import micro_batches_in_flight
from elastic_train.planner.search_options import Mesh, Schedule, Sharing, sharing_layout
from elastic_train.planner.search_space import Space

_COPIES = ("ddp", "zero1", "zero2")
_LOOKS = 4
"""Of the options that need least by the bound so many are looked at, to find those that need least."""


@dataclass(frozen=True, slots=True)
class Held:
    """A layout with its options written into ``job``, and what its fullest rank holds."""

    job: Job
    layout: Layout
    fullest: RankMemory

    @property
    def options(self) -> dict[str, str | int | bool]:
        """What was chosen beside the axes. The schedule only where there is one."""
        parallel, training = self.job.parallel, self.job.training
        chosen: dict[str, str | int | bool] = {"data": parallel.data}
        if parallel.data in ("zero3", "hsdp"):
            chosen["reshard_after_forward"] = parallel.reshard_after_forward
        chosen |= {"micro_batch": training.micro_batch, "recompute": training.recompute}
        if self.layout.cp > 1:
            chosen["context"] = parallel.context
        if self.layout.pp > 1:
            chosen["pipeline"] = parallel.pipeline
            if parallel.stages_per_rank > 1:
                chosen["virtual_stages"] = parallel.virtual_stages
        return chosen

    def too_much(self, limit: int) -> str:
        """That it does not fit, and its biggest term."""
        term, size = max(self.fullest.terms.items(), key=lambda item: item[1])
        chosen = ", ".join(f"{name}={_yaml(value)}" for name, value in self.options.items())
        return (
            f"{self.layout} ({chosen}) needs {gib(self.fullest.total)} of {gib(limit)}; its biggest term is {term} "
            f"with {gib(size)}"
        )


class _Resident(NamedTuple):
    """Of a pipeline rank, whatever the micro-batch and what is recomputed."""

    number: int
    state: int
    """bytes"""
    blocks: int
    received: int
    """stages of it that receive, forwards and backwards"""
    head: bool
    added_up: int
    """bytes of whole gradients that wait for the last micro-batch"""


Way = tuple[Sharing, Schedule, int, str]
"""Sharing, schedule, micro-batch, what is recomputed."""


class MemoryFloor:
    """Bytes without which no options run: state, activations of blocks in flight, logits, what pipelines receive into.

    Of the first rank, the last one, and one with most blocks. Gradients on their way and buffers are left out.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._residents: dict[tuple[Mesh, Sharing, tuple[str, int]], list[_Resident]] = {}
        self._kept: dict[tuple[int, int, str, int, str], int] = {}
        self._alive: dict[tuple[tuple[str, int], int, int, int], float] = {}
        self._lost: dict[tuple[int, int, int, bool], int] = {}
        self._jobs: dict[tuple[str, bool, Schedule], Job] = {}
        self._blocks: dict[tuple[int, tuple[str, int]], dict[int, int]] = {}
        job = space.job
        device = job.hosts.device
        self._slack = 1 + SLACK[device] if SLACK_LIMIT[device] is None else 1.0
        self._state = (
            0 if job.parallel.offload else job.model.num_parameters * (FLOAT32 + moments_of(job.optimizer).matrix)
        )
        self._number, self._runtime = numbers_of(job).compute, RUNTIME[device]
        self._number_and_gradient = self._number + numbers_of(job).gradient

    def of(self, mesh: Mesh, way: Way) -> int:
        sharing, schedule, micro_batch, recompute = way
        job = self._space.job
        count = -(-(job.training.global_batch // micro_batch) // mesh.data_ranks)
        count = equal_rounds(count, mesh.pp, schedule.pipeline)
        kept = self._kept_by_block(mesh, schedule.context, micro_batch, recompute)
        received = count * micro_batch * job.data.sequence_length // (mesh.cp * mesh.tp) * job.model.hidden_size
        received *= self._number
        most = 0
        for rank in self._resident(mesh, sharing, schedule):
            flying = self._flying(schedule, mesh.pp, rank.number, count)
            passing = flying * rank.blocks * kept
            if count > 1:  # those of earlier micro-batches are there, and perhaps no more of others to come
                later = min(flying, count - 1.0) * rank.blocks * kept + rank.added_up
                passing = max(passing, later)
            passing += rank.received * received
            if rank.head:
                passing += self._logits(mesh, micro_batch)
            most = max(most, rank.state + int(passing * self._slack))
        return most + self._runtime

    def leanest(self, mesh: Mesh) -> Held | None:
        """The options that need least; None if none are valid."""
        ways = sorted(self._lean(mesh), key=lambda way: self.of(mesh, way))
        found: list[Held] = []
        for way in ways:
            job, layout = self._space.question(mesh, *way)
            if violated(job, layout) is None:
                found.append(Held(job, layout, fullest_rank(job, layout)))
            if len(found) == _LOOKS:
                break
        return min(found, key=lambda held: held.fullest.total, default=None)

    def least(self, mesh: Mesh) -> int:
        """Bytes that ``leanest`` needs at least."""
        return min((self.of(mesh, way) for way in self._lean(mesh)), default=0)

    def may_fit(self, mesh: Mesh, limit: int) -> bool:
        """Whether ``least`` is at most ``limit`` bytes."""
        return self._state <= limit * mesh.world_size and any(self.of(mesh, way) <= limit for way in self._lean(mesh))

    @property
    def anywhere(self) -> int:
        """Bytes that some rank needs on any number of accelerators: for the whole embedding and its gradient.

        Only the tensor ranks of a node cut them. All strategies hold at some moment twice the matrix, one of them as
        gradients are reduced: with zero3 at the end of the backward pass, elsewhere anyway.
        """
        model, space = self._space.job.model, self._space
        tp = space.per_node if "tp" in space.free else int(space.job.parallel.tp)
        return self._runtime + self._number_and_gradient * model.vocab_size * model.hidden_size // tp

    def ends(self, widest: Mesh) -> list[Mesh]:
        """Those with its sizes of tp, pp and cp, and at most its data ranks, of which one fits if any does."""
        meshes = iter([widest, *self._space.narrower(widest)])
        valid = next((mesh for mesh in meshes if violated(*self._space.easiest(mesh)) is None), None)
        rest = list(meshes)
        if valid is None:
            return []
        return [valid, *(rest[-1:] if self.grows(valid) else rest)]

    def grows(self, mesh: Mesh) -> bool:
        """Whether ``least`` of fewer data ranks is no less, but for one alone.

        Not where another cut of the replicas may leave more shards, or other schedules have enough micro-batches.
        """
        parallel, slots = self._space.job.parallel, self._space.slots
        same = "data" in self._space.free or parallel.data != "hsdp"
        return same and (mesh.pp == 1 or -(-slots // mesh.data_ranks) >= mesh.pp)

    def fits(self, mesh: Mesh, limit: int) -> bool:
        """Whether some options fit in ``limit`` bytes."""
        if violated(*self._space.easiest(mesh)) is not None or not self.may_fit(mesh, limit):
            return False
        ways = sorted((self.of(mesh, way), order, way) for order, way in enumerate(self._lean(mesh)))
        questions = (self._space.question(mesh, *way) for least, _, way in ways if least <= limit)
        asked = itertools.islice((question for question in questions if violated(*question) is None), _LOOKS)
        return any(fullest_rank(*question).total <= limit for question in asked)

    def _lean(self, mesh: Mesh) -> Iterator[Way]:
        """For each schedule and sharing the smallest micro-batch with the most recomputation that goes with it.

        Of ddp, zero1 and zero2 the last that competes: it shares what the others share, and more. Of both kinds of
        context parallelism the second: ``ulysses`` keeps keys and values of its own tokens only, and needs no masks.
        """
        smallest: dict[Schedule, int] = {}
        context = self._space.contexts(mesh.tp, mesh.cp)[-1]
        for schedule, micro_batch in self._space.ways(mesh):
            if schedule.context == context:
                smallest.setdefault(schedule, micro_batch)
        sharings = self._space.sharings(mesh)
        copies = [sharing for sharing in sharings if sharing.data in _COPIES]
        sharings = [sharing for sharing in reversed(sharings) if sharing not in copies[:-1]]
        kinds = self._space.recomputes()
        for schedule, micro_batch in smallest.items():
            split = mesh.pp > 1 and schedule.splits_backward
            most = [kind for kind in kinds if not (split and kind == "full")]
            for sharing in sharings:
                yield from ((sharing, schedule, micro_batch, kind) for kind in most[-1:] or kinds[-1:])

    def _kept_by_block(self, mesh: Mesh, context: str, micro_batch: int, recompute: str) -> int:
        key = (mesh.tp, mesh.cp, context, micro_batch, recompute)
        if key not in self._kept:
            job = self._space.job
            self._kept[key] = sum(
                block_bytes(
                    job.model,
                    Layout(cp=mesh.cp, tp=mesh.tp),
                    sequence=job.data.sequence_length,
                    batch=micro_batch,
                    number_bytes=numbers_of(job).compute,
                    recompute=recompute,  # type: ignore[arg-type]
                    context=context,  # type: ignore[arg-type]
                    fused_norm=job.hosts.device == "cuda",
                ).values()
            )
        return self._kept[key]

    def _logits(self, mesh: Mesh, micro_batch: int) -> int:
        """With their loss, of one micro-batch."""
        key = (mesh.tp, mesh.cp, micro_batch, mesh.pp > 1)
        if key not in self._lost:
            job = self._space.job
            layout = Layout(pp=min(mesh.pp, 2), cp=mesh.cp, tp=mesh.tp)
            shape = {"sequence": job.data.sequence_length, "batch": micro_batch, "number_bytes": self._number}
            self._lost[key] = loss_bytes(job.model, layout, **shape).most
        return self._lost[key]

    def _flying(self, schedule: Schedule, pp: int, rank: int, count: int) -> float:
        """Micro-batches that a rank keeps activations of."""
        if pp == 1:
            return 1.0
        key = (schedule[:2], pp, rank, count)
        if key not in self._alive:
            parallel = self._space.job.parallel.model_copy(update=schedule._asdict())
            self._alive[key] = float(micro_batches_in_flight(parallel, pp, rank, count))
        return self._alive[key]

    def _resident(self, mesh: Mesh, sharing: Sharing, schedule: Schedule) -> list[_Resident]:
        key = (mesh, sharing, schedule[:2])  # nothing of it depends on how sequences are cut
        if key not in self._residents:
            self._residents[key] = list(self._measure(mesh, sharing, schedule))
        return self._residents[key]

    def _measure(self, mesh: Mesh, sharing: Sharing, schedule: Schedule) -> Iterator[_Resident]:
        job, layout = self._job(sharing, schedule), sharing_layout(mesh, sharing)
        if job.parallel.stages_per_rank * mesh.pp > job.model.num_hidden_layers and mesh.pp > 1:
            return  # not valid: a constraint says so
        ranks = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length)
        sharded = division(job, layout) == "all"
        keeps = not sharing.reshard_after_forward or mesh.pp > 1
        waits = sharded and keeps and job.training.determinism == "default"
        for number, blocks in self._telling(mesh.pp, schedule, ranks).items():
            stages = ranks[number]
            state = {} if job.parallel.offload else model_state(job, layout, stages)
            held = sum(state.values()) - (state.get("gradients", 0) if sharded else 0)
            if sharded and keeps:
                held += self._number * sum(stage.padded for stage in stages)
            ends = sum((not stage.first) + (not stage.last) for stage in stages)
            added_up = numbers_of(job).gradient * sum(stage.whole for stage in stages) if waits else 0
            head = any(stage.last for stage in stages)
            yield _Resident(number, held, blocks, ends if mesh.pp > 1 else 0, head, added_up)

    def _job(self, sharing: Sharing, schedule: Schedule) -> Job:
        """With these options; sizes of axes are not in it."""
        key = (sharing.data, sharing.reshard_after_forward, schedule)
        if key not in self._jobs:
            self._jobs[key] = self._space.question(Mesh(1, 1, 1, 1), sharing, schedule, 1, "none")[0]
        return self._jobs[key]

    def _telling(self, pp: int, schedule: Schedule, ranks: list[list[StageParameters]]) -> dict[int, int]:
        """The first pipeline rank, one with most blocks, and the last one, each with its blocks."""
        if (pp, schedule[:2]) not in self._blocks:
            blocks = [sum(stage.blocks for stage in stages) for stages in ranks]
            numbers = sorted({0, blocks.index(max(blocks)), pp - 1})
            self._blocks[pp, schedule[:2]] = {number: blocks[number] for number in numbers}
        return self._blocks[pp, schedule[:2]]


def gib(size: float) -> str:
    """``74.51 GiB``"""
    return f"{size / 2**30:,.2f} GiB"


def _yaml(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
