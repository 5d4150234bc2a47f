"""How much memory the options of a mesh need at least: what a search need not look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32, block_bytes, kernel_of, loss_bytes
from elastic_train.planner.constraints import equal_rounds
from elastic_train.planner.memory import RUNTIME, SLACK, SLACK_LIMIT
from elastic_train.planner.model_state import Division, divided, model_state, moments_of, numbers_of
from elastic_train.planner.parameters import RankBlocks, block_size, blocks_of_ranks, stages_of_ranks, units_of
from elastic_train.planner.schedule import micro_batches_in_flight
from elastic_train.planner.search_options import Mesh, Schedule, Sharing, sharing_layout
from elastic_train.planner.search_space import Space

_COPIES = ("ddp", "zero1", "zero2")


class _Resident(NamedTuple):
    """Of a pipeline rank, whatever the micro-batch and what is recomputed."""

    number: int
    state: int
    """bytes"""
    rank: RankBlocks
    added_up: int
    """bytes of whole gradients that wait for the last micro-batch"""


class _State(NamedTuple):
    """Bytes that no strategy holds less of on a rank."""

    whole: int
    """weights in the precision of compute: of the stage, or of what is outside the blocks"""
    whole_or_shared: int
    """frozen weights, or masters that are those weights as well"""
    shared: int
    """masters and moments"""


Way = tuple[Sharing, Schedule, int, str]
"""Sharing, schedule, micro-batch, what is recomputed."""


class MemoryFloor:
    """Bytes without which no options run: state, activations of blocks in flight, logits, what pipelines receive into.

    Of the first rank, the last one, and one with most blocks. Gradients on their way and buffers are left out.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._residents: dict[tuple[int, int, int, Division, bool, tuple[str, int]], list[_Resident]] = {}
        self._kept: dict[tuple[int, int, str, int, str], int] = {}
        self._alive: dict[tuple[tuple[str, int], int, int, int], float] = {}
        self._lost: dict[tuple[int, int, int, bool], int] = {}
        self._jobs: dict[tuple[str, bool, Schedule], Job] = {}
        self._blocks: dict[tuple[int, tuple[str, int]], dict[int, RankBlocks]] = {}
        self._least_states: dict[tuple[int, int, tuple[str, int]], list[tuple[int, RankBlocks, _State]]] = {}
        self._outlines: dict[Mesh, int] = {}
        """of meshes and those with fewer data ranks"""
        job = space.job
        device = job.hosts.device
        self._slack = 1 + SLACK[device] if SLACK_LIMIT[device] is None else 1.0
        self._number, self._gradient = numbers_of(job).compute, numbers_of(job).gradient
        self._runtime = RUNTIME[device]
        copies = "data" not in space.free and job.parallel.data in _COPIES
        released = "reshard_after_forward" in space.free or job.parallel.reshard_after_forward
        self._keeps = copies or not released
        """whether all weights of a stage are there in the precision of compute"""
        # All strategies hold at some moment twice the embedding, or a block, once as gradients are reduced: with zero3
        # as that is done for what is outside of blocks, or for the block, elsewhere anyway.
        largest = max(job.model.vocab_size * job.model.hidden_size, block_size(job.model))
        # With lora none of them has a gradient.
        self._largest = (self._number + (self._gradient if job.lora is None else 0)) * largest

    def of(self, mesh: Mesh, way: Way) -> int:
        sharing, schedule, micro_batch, recompute = way
        count = self._count(mesh, schedule, micro_batch)
        kept = self._kept_by_block(mesh, schedule.context, micro_batch, recompute)
        received = self._received(mesh, count * micro_batch)
        most = 0
        for number, state, rank, added_up in self._resident(mesh, sharing, schedule):
            flying = self._flying(schedule, mesh.pp, number, count)
            passing = flying * rank.blocks * kept
            if count > 1:  # those of earlier micro-batches are there, and perhaps no more of others to come
                later = min(flying, count - 1.0) * rank.blocks * kept + added_up
                passing = max(passing, later)
            passing += _receiving(rank) * received
            if rank.last:
                passing += self._logits(mesh, micro_batch)
            most = max(most, state + int(passing * self._slack))
        return most + self._runtime

    def least(self, mesh: Mesh) -> int:
        """Of the options that need least."""
        return min((self.of(mesh, way) for way in self.lean(mesh)), default=0)

    def may_fit(self, mesh: Mesh, limit: int) -> bool:
        """Whether ``least`` is at most ``limit`` bytes."""
        return self.outline(mesh) <= limit and any(self.of(mesh, way) <= limit for way in self.lean(mesh))

    def outline(self, mesh: Mesh, *, fewer: bool = False) -> int:
        """At most ``least``, and sooner known: the state is taken as cut over all that can share it.

        ``fewer``: at most that of the mesh with fewer data ranks, too. Then some micro-batch is in flight.
        """
        if not fewer:
            return self._outline(mesh, fewer=False)
        if mesh not in self._outlines:
            self._outlines[mesh] = self._outline(mesh, fewer=True)
        return self._outlines[mesh]

    def _outline(self, mesh: Mesh, *, fewer: bool) -> int:
        size, shards = self._space.micro_batches()[0], self._most_shards(mesh)
        context = self._space.contexts(mesh.tp, mesh.cp)[-1]
        enough = mesh.pp == 1 or -(-self._space.slots // mesh.data_ranks) >= mesh.pp
        some = fewer or "pipeline" not in self._space.free
        logits, found = self._logits(mesh, size), []
        for schedule in self._space.pipelines(mesh.pp):
            if some or enough != (schedule.pipeline == "gpipe"):
                count = self._count(mesh, schedule, size)
                kept = self._kept_by_block(mesh, context, size, self._most_recomputed(mesh, schedule))
                received, most = self._received(mesh, count * size), 0
                for number, rank, state in self._states(mesh, schedule):
                    flying = 1.0 if fewer else self._flying(schedule, mesh.pp, number, count)
                    passing = flying * rank.blocks * kept + _receiving(rank) * received + rank.last * logits
                    held = max(state.whole, state.whole_or_shared / shards) + state.shared / shards
                    most = max(most, int(held + passing * self._slack))
                found.append(most)
        return max(min(found), self._largest // mesh.tp) + self._runtime if found else 0

    def grows(self, mesh: Mesh) -> bool:
        """Whether ``least`` of fewer data ranks is no less, but for one alone.

        Not where another cut of the replicas may leave more shards, or other schedules have enough micro-batches.
        """
        return not self._space.cuts_vary and (mesh.pp == 1 or -(-self._space.slots // mesh.data_ranks) >= mesh.pp)

    def lean(self, mesh: Mesh) -> Iterator[Way]:
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
        for schedule, micro_batch in smallest.items():
            kind = self._most_recomputed(mesh, schedule)
            yield from ((sharing, schedule, micro_batch, kind) for sharing in sharings)

    def _most_recomputed(self, mesh: Mesh, schedule: Schedule) -> str:
        kinds = self._space.recomputes()
        split = mesh.pp > 1 and schedule.splits_backward
        return next((kind for kind in reversed(kinds) if not (split and kind == "full")), kinds[-1])

    def _count(self, mesh: Mesh, schedule: Schedule, micro_batch: int) -> int:
        """Micro-batches of a data rank."""
        count = -(-(self._space.job.training.global_batch // micro_batch) // mesh.data_ranks)
        return equal_rounds(count, mesh.pp, schedule.pipeline)

    def _received(self, mesh: Mesh, sequences: int) -> int:
        """Bytes that a stage receives of so many sequences, in one direction."""
        job = self._space.job
        return sequences * job.data.sequence_length // (mesh.cp * mesh.tp) * job.model.hidden_size * self._number

    def _states(self, mesh: Mesh, schedule: Schedule) -> list[tuple[int, RankBlocks, _State]]:
        """Of the ranks that tell."""
        key = (mesh.tp, mesh.pp, schedule[:2])
        if key not in self._least_states:
            telling = self._telling(mesh.pp, schedule)
            self._least_states[key] = [(number, rank, self._state(mesh, rank)) for number, rank in telling.items()]
        return self._least_states[key]

    def _state(self, mesh: Mesh, rank: RankBlocks) -> _State:
        job = self._space.job
        block, outside = units_of(job.model, mesh.tp, 1, job.lora)
        if mesh.pp == 1:
            outer = outside[True, True].whole
        else:
            outer = rank.first * outside[True, False].whole + rank.last * outside[False, True].whole
        whole = rank.blocks * block.whole + outer
        trained = whole if job.lora is None else rank.blocks * block.trained.whole
        gathered = self._number * (whole if mesh.pp > 1 or self._keeps else outer)
        if job.parallel.offload:
            return _State(gathered, 0, 0)
        moments = (moments_of(job.optimizer).matrix + (FLOAT32 if job.training.ema_decay is not None else 0)) * trained
        if numbers_of(job).separate_master:
            return _State(gathered, self._number * (whole - trained), FLOAT32 * trained + moments)
        return _State(gathered, FLOAT32 * whole, moments)

    def _most_shards(self, mesh: Mesh) -> int:
        """Ranks that can share the state."""
        space = self._space
        if "data" not in space.free and space.job.parallel.data == "ddp":
            return 1
        most = mesh.data_ranks // space.given("dp_replicate")
        return mesh.cp * (most if "dp_shard" in space.free else space.given("dp_shard"))

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
                    kernel=kernel_of(job, mesh.cp, context),
                    documents=job.data.separates_documents,
                    fused_norm=job.hosts.device == "cuda",
                    lora=job.lora,
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
        shards = sharing.dp_shard * mesh.cp
        cut = divided(sharing.data, sharing.dp_replicate, shards, offload=self._space.job.parallel.offload)
        keeps = not sharing.reshard_after_forward or mesh.pp > 1
        # Nothing of it depends on how sequences are cut, or on how often what is cut is there.
        key = (mesh.pp, mesh.tp, shards if cut != "none" else 1, cut, keeps, schedule[:2])
        if key not in self._residents:
            self._residents[key] = list(self._measure(mesh, sharing, schedule, sharded=cut == "all", keeps=keeps))
        return self._residents[key]

    def _measure(
        self, mesh: Mesh, sharing: Sharing, schedule: Schedule, *, sharded: bool, keeps: bool
    ) -> Iterator[_Resident]:
        telling = self._telling(mesh.pp, schedule)
        if not telling:
            return  # not valid: a constraint says so
        job, layout = self._job(sharing, schedule), sharing_layout(mesh, sharing)
        ranks = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length, job.lora)
        waits = sharded and keeps and job.training.determinism == "default"
        for number, rank in telling.items():
            stages = ranks[number]
            state = {} if job.parallel.offload else model_state(job, layout, stages)
            held = sum(state.values()) - (state.get("gradients", 0) if sharded else 0)
            if sharded and keeps:
                held += self._number * sum(stage.padded for stage in stages)
            added_up = self._gradient * sum(stage.trained.whole for stage in stages) if waits else 0
            yield _Resident(number, held, rank, added_up)

    def _job(self, sharing: Sharing, schedule: Schedule) -> Job:
        """With these options; sizes of axes are not in it."""
        key = (sharing.data, sharing.reshard_after_forward, schedule)
        if key not in self._jobs:
            self._jobs[key] = self._space.question(Mesh(1, 1, 1, 1), sharing, schedule, 1, "none")[0]
        return self._jobs[key]

    def _telling(self, pp: int, schedule: Schedule) -> dict[int, RankBlocks]:
        """The first pipeline rank, one with most blocks, and the last one; none if not every stage has a block."""
        key = (pp, schedule[:2])
        if key not in self._blocks:
            job = self._space.job
            ranks = blocks_of_ranks(job.model, job.data.sequence_length, *schedule[:2], pp)
            blocks = [rank.blocks for rank in ranks]
            numbers = sorted({0, blocks.index(max(blocks)), pp - 1}) if ranks else []
            self._blocks[key] = {number: ranks[number] for number in numbers}
        return self._blocks[key]


def _receiving(rank: RankBlocks) -> int:
    """Buffers that it receives a step's activations and their gradients into; none without a pipeline."""
    return 2 * rank.stages - rank.first - rank.last
