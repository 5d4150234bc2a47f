"""Exchanges of weights and gradients: along the data axes, and what tensor ranks and tied embeddings owe each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32
from elastic_train.planner.exchange import Axis, Exchange, Overlap, exchange
from elastic_train.planner.parameters import Parameter, StageParameters, Unit, block_parameters, outer_parameters
from elastic_train.planner.schedule import Pass, schedule_order
from elastic_train.planner.traffic_activations import compute_bytes, compute_dtype

ACTIVE_STAGES = 3
"""Stages whose weights torch's schedules of several stages per rank keep gathered (``_add_unshard_reshard``)."""
EXACT_BUCKET = 1 << 22
"""Elements that ``determinism: exact`` exchanges at a time (``parallel.exact.BUCKET``), or one parameter."""
MATRICES = 7
"""of a block, which muon orthogonalises"""


def state_exchanges(
    job: Job, layout: Layout, number: int, stages: Sequence[StageParameters], count: int
) -> list[Exchange]:
    """Of pipeline rank ``number`` with ``stages``, for ``count`` micro-batches."""
    rank = _Rank(job, layout, number, stages, count)
    found = [*rank.gathered_weights(), *rank.gradients(), *rank.published_weights(), *rank.owed()]
    return found + list(rank.matrices()) if job.optimizer.name == "muon" else found


@dataclass(frozen=True, slots=True)
class _Rank:
    job: Job
    layout: Layout
    number: int
    stages: Sequence[StageParameters]
    count: int

    @property
    def alone(self) -> bool:
        """No other rank sees other tokens."""
        return self.layout.dp_replicate * self.layout.shards == 1

    @property
    def fsdp(self) -> bool:
        return self.job.parallel.data in ("zero3", "hsdp") and (not self.alone or self.job.parallel.offload)

    @property
    def cut(self) -> bool:
        """Whether master weights are cut over the shard group."""
        return self.fsdp or (self.job.parallel.data in ("zero1", "zero2") and self.layout.shards > 1)

    @property
    def exact(self) -> bool:
        return self.job.training.determinism == "exact"

    @property
    def trained(self) -> list[StageParameters]:
        """The stages without what is frozen."""
        return [stage.trained for stage in self.stages]

    @property
    def blocks(self) -> int:
        return sum(stage.blocks for stage in self.stages)

    @property
    def reduce(self) -> tuple[int, str]:
        """Bytes and dtype of gradients while they are reduced."""
        return (4, "float32") if self.job.training.reduce_dtype == "fp32" else (2, "bfloat16")

    def gathered_weights(self) -> Iterator[Exchange]:
        """zero3 and hsdp: once a step, or before each use with ``reshard_after_forward`` (blocks only)."""
        if not self.fsdp:
            return
        for stage, what, unit, times, overlaps in self._gathered():
            yield self._weights(f"weights of {what}", times, unit.padded, overlaps, stage.blocks)
            if self.job.parallel.offload:
                yield self._copy(f"weights of {what} from CPU memory", times, unit, overlaps, stage.blocks)

    def _gathered(self) -> Iterator[tuple[StageParameters, str, Unit, int, Overlap]]:
        """Stage, what of it, how large, how often in a step, and beside what."""
        release, pp = self.job.parallel.reshard_after_forward, self.layout.pp
        overlaps: Overlap = (
            "nothing" if self.job.parallel.prefetch == 0 else "all passes" if release else "first forward"
        )
        for stage, gathers, outer in self._gathers():
            if pp == 1 and release:
                gathers, outer = 2 * self.count, self.count
            yield stage, "blocks", stage.block, gathers * stage.blocks, overlaps
            yield stage, "the rest", stage.outer, outer, "nothing"

    def _copy(self, what: str, count: int, unit: Unit, overlaps: Overlap, units: int) -> Exchange:
        """Between accelerator and CPU: parts of master weights, and of gradients, in their precision."""
        nbytes = FLOAT32 * unit.trained.part + compute_bytes(self.job) * (unit.part - unit.trained.part)
        return exchange(self.layout, "host", what, "copy", count, nbytes, "float32", overlaps, units)

    def _gathers(self) -> Iterator[tuple[StageParameters, int, int]]:
        """How often each stage gathers a block, and what is outside the blocks."""
        parallel, pp = self.job.parallel, self.layout.pp
        if pp > 1 and parallel.stages_per_rank > ACTIVE_STAGES:
            order = schedule_order(parallel.pipeline, pp, self.count, parallel.stages_per_rank)[self.number]
            blocks, outer = gathers_of(order, release=parallel.reshard_after_forward), gathers_of(order, release=False)
            yield from ((stage, blocks[stage.stage], outer[stage.stage]) for stage in self.stages)
            return
        # A forward pass releases, and its backward pass gathers and keeps: once more than there are micro-batches.
        times = self.count + 1 if pp > 1 and parallel.reshard_after_forward else 1
        yield from ((stage, times, 1) for stage in self.stages)

    def _weights(self, what: str, count: int, elements: int, overlaps: Overlap, units: int) -> Exchange:
        size, dtype = compute_bytes(self.job), compute_dtype(self.job)
        return exchange(self.layout, "shard", what, "all_gather", count, elements * size, dtype, overlaps, units)

    def gradients(self) -> Iterator[Exchange]:
        if self.exact:
            yield from self._exact_sums()
        elif self.fsdp:
            yield from self._fsdp_gradients()
        elif self.job.parallel.data == "zero2" and self.cut:
            yield from self._scattered_gradients()
        elif not self.alone:
            yield from self._reduced_gradients()

    def _fsdp_gradients(self) -> Iterator[Exchange]:
        """Reduce-scatter, and an all-reduce of the parts over replicas (arXiv:2304.11277, section 3.2.2)."""
        often = self.job.parallel.reshard_after_forward and self.layout.pp == 1
        times, (size, dtype) = self.count if often else 1, self.reduce
        # torch's stages reduce after their last backward pass.
        overlaps: Overlap = "nothing" if self.layout.pp > 1 else "backwards" if often else "last backward"
        for stage in self.trained:
            for what, unit, each in (("blocks", stage.block, stage.blocks), ("the rest", stage.outer, 1)):
                wanted: Overlap = overlaps if what == "blocks" else "nothing"
                whole, part = unit.padded * size, unit.part * size
                what = f"gradients of {what}"
                layout, units = self.layout, stage.blocks
                yield exchange(layout, "shard", what, "reduce_scatter", times * each, whole, dtype, wanted, units)
                yield exchange(layout, "replicate", what, "all_reduce", times * each, part, dtype, wanted, units)
                if self.job.parallel.offload:
                    yield self._copy(f"{what} to CPU memory", times * each, unit, wanted, units)

    def _reduced_gradients(self) -> Iterator[Exchange]:
        """ddp and zero1: one all-reduce per bucket, when the last gradient of the step has arrived in it."""
        size, dtype = self.reduce
        overlaps: Overlap = "nothing" if self.job.parallel.splits_backward and self.layout.pp > 1 else "last backward"
        outer = sum(stage.outer.whole for stage in self.trained) * size
        block, layout = self.trained[0].block.whole * size, self.layout
        what = "gradients of blocks"
        yield exchange(layout, "batch", what, "all_reduce", self.blocks, block, dtype, overlaps, self.blocks)
        yield exchange(layout, "batch", "gradients of the rest", "all_reduce", 1, outer, dtype)

    def _scattered_gradients(self) -> Iterator[Exchange]:
        """zero2: a reduce-scatter per bucket and backward pass; over replicas an all-reduce of the parts, once."""
        size, dtype = self.reduce
        layout, block = self.layout, self.trained[0].block
        outer = sum(stage.outer.part for stage in self.trained)
        split = self.job.parallel.splits_backward and layout.pp > 1
        scatters = sum(stage.blocks * (1 if split and stage.stage else self.count) for stage in self.stages)
        overlaps: Overlap = "nothing" if split else "backwards"
        what, rest = "gradients of blocks", "gradients of the rest"
        whole, times = block.padded * size, self._outer_scatters() if split else self.count
        yield exchange(layout, "shard", what, "reduce_scatter", scatters, whole, dtype, overlaps, self.blocks)
        yield exchange(layout, "shard", rest, "reduce_scatter", times, outer * layout.shards * size, dtype)
        yield exchange(layout, "replicate", what, "all_reduce", self.blocks, block.part * size, dtype)
        yield exchange(layout, "replicate", rest, "all_reduce", 1, outer * size, dtype)

    def _outer_scatters(self) -> int:
        """Where the backward pass is split only the first stage's tells that a gradient is there (torch calls hooks).

        With zbv the first rank has the head as well: its bucket is full when both have brought something.
        """
        if not any(stage.first for stage in self.stages):
            return 1
        if not any(stage.last for stage in self.stages):
            return self.count
        parallel = self.job.parallel
        order = schedule_order(parallel.pipeline, self.layout.pp, self.count, parallel.stages_per_rank)[self.number]
        scatters, head, embedding = 0, False, False
        for kind, stage, _ in order:
            if kind == "W":
                embedding, head = embedding or not stage, head or bool(stage)
                if not stage and head:
                    scatters, head, embedding = scatters + 1, False, False
        return scatters + (head or embedding)

    def _exact_sums(self) -> Iterator[Exchange]:
        """64-bit integers: to the owner of each part, who adds them up, or an all-reduce where nothing is cut."""
        parts, layout = self.layout.shards if self.cut else 1, self.layout
        buckets, elements = exact_buckets(self.job, layout, self.stages, parts)
        what, mean = "exact sums of gradients", 8 * elements / buckets
        if parts > 1:
            yield exchange(layout, "shard", what, "all_to_all", buckets, mean * parts, "int64")
        axis: Axis = "replicate" if self.cut else "batch"
        yield exchange(layout, axis, what, "all_reduce", buckets, mean, "int64")

    def published_weights(self) -> Iterator[Exchange]:
        """zero1 and zero2: after the update every rank gets the parts of the others."""
        if not self.cut or self.fsdp:
            return
        outer = sum(stage.outer.padded for stage in self.trained)
        yield self._weights("updated weights of blocks", self.blocks, self.trained[0].block.padded, "nothing", 1)
        yield self._weights("updated weights of the rest", 1, outer, "nothing", 1)

    def owed(self) -> Iterator[Exchange]:
        """Tensor ranks have shares of the gradients of norms and of some adapters. Tied embeddings have two copies."""
        size, dtype = (8, "int64") if self.exact else (4, "float32") if self.fsdp else self.reduce
        layout, model = self.layout, self.job.model
        shards = layout.shards if self.cut else 1
        whole = sum(stage.blocks * self._uncut(block_parameters(model, self.job.lora), shards) for stage in self.stages)
        for stage in self.stages:
            outer = outer_parameters(model, first=stage.first, last=stage.last, lora=self.job.lora)
            whole += self._uncut(outer, shards)
        yield exchange(layout, "tp", "gradients that tensor ranks share", "all_reduce", 1, whole * size, dtype)
        if self.job.lora is None and model.tie_word_embeddings and layout.pp > 1 and self.number in (0, layout.pp - 1):
            rows = -(-model.vocab_size // layout.tp)
            rows = -(-rows // layout.shards) if self.cut else rows
            table = rows * model.hidden_size * size
            yield exchange(layout, "ends", "gradient of the tied embedding", "send", 1, table, dtype)

    def _uncut(self, parameters: Iterable[Parameter], shards: int) -> int:
        """Elements of trained tensors that every tensor rank holds, of the first of ``shards``."""
        found = (each.shape for each in parameters if each.trained and each.tensor_dim is None)
        return sum(-(-rows // shards) * math.prod(rest) for rows, *rest in found)

    def matrices(self) -> Iterator[Exchange]:
        """muon: parts to the rank that orthogonalises a matrix, and the result to all ranks that hold some of it.

        The mean over the ranks of a stage, each of which takes one matrix of a round.
        """
        layout, dtype = self.layout, compute_dtype(self.job)
        ranks, shards = layout.world_size // layout.pp, layout.shards if self.cut else 1
        rounds = -(-MATRICES * self.blocks // ranks)
        numbers = self.blocks * sum(
            parameter.shape[0] * parameter.shape[1]
            for parameter in block_parameters(self.job.model)
            if len(parameter.shape) == 2
        )
        each = numbers * compute_bytes(self.job) / rounds
        what = "parts of matrices to their owner"
        yield exchange(layout, "stage", what, "all_to_all", rounds, each / ranks, dtype)
        what = "orthogonal matrices from their owner"
        yield exchange(layout, "stage", what, "all_to_all", rounds, each / (shards * layout.tp), dtype)


def gathers_of(order: Sequence[Pass], *, release: bool) -> dict[int, int]:
    """Stage -> how often its weights are gathered in a step, while ``ACTIVE_STAGES`` may be there at once.

    ``release``: a forward pass ends with releasing them.
    """
    found: dict[int, int] = {}
    active: set[int] = set()
    there: set[int] = set()

    def gather(stage: int) -> None:
        if stage not in there:
            found[stage] = found.get(stage, 0) + 1
            there.add(stage)

    for place, step in enumerate(order):
        wanted = _next_stages(order, place)
        there -= active - set(wanted)
        for stage in wanted:
            if stage not in active:
                gather(stage)
        active = set(wanted)
        gather(step.stage)
        if step.kind == "F" and release:
            there.discard(step.stage)
    return found


def _next_stages(order: Sequence[Pass], place: int) -> list[int]:
    wanted: list[int] = []
    for index in range(place, len(order)):
        if (stage := order[index].stage) not in wanted:
            wanted.append(stage)
            if len(wanted) == ACTIVE_STAGES:
                break
    return wanted


def exact_buckets(job: Job, layout: Layout, stages: Sequence[StageParameters], parts: int) -> tuple[int, int]:
    """Number of buckets of ``determinism: exact``, and the elements of one part of all of them together."""
    buckets, filled, total = 1, 0, 0
    for stage in stages:
        first = [*outer_parameters(job.model, first=stage.first, last=False, lora=job.lora)]
        every = [*outer_parameters(job.model, first=stage.first, last=stage.last, lora=job.lora)]
        names = first + stage.blocks * [*block_parameters(job.model, job.lora)] + every[len(first) :]
        for parameter in (parameter for parameter in names if parameter.trained):
            rows, *rest = parameter.cut(layout.tp)
            width = -(-rows // parts) * (rest[0] if rest else 1)
            if filled and parts * (filled + width) > EXACT_BUCKET:
                buckets, filled = buckets + 1, 0
            filled, total = filled + width, total + width
    return buckets, total
