"""What a search for a layout may vary, and in which sizes. What the job file says stays.

Sizes that a constraint forbids are told apart, so that a search can say what forbids them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from elastic_train.config.job import Job
from elastic_train.config.layout import AXES, Layout
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.planner.axis_sizes import divisors, smallest_layout
from elastic_train.planner.constraints import violated
from elastic_train.planner.data_ranks import worth_a_look
from elastic_train.planner.search_options import (
    CONTEXTS,
    RECOMPUTE,
    SCHEDULES,
    SHARING,
    Mesh,
    Schedule,
    Sharing,
    sharing_layout,
)

_PARALLEL = ("data", "reshard_after_forward", "pipeline", "virtual_stages", "context")
_TRAINING = ("micro_batch", "recompute")
LARGEST_MICRO_BATCH = 64
_FEW, _POWERS = 16, 5


@dataclass(frozen=True)
class Space:
    """Everything that may be varied of ``job``: the names in ``free`` (fields of ``parallel`` and ``training``).

    ``per_node``: accelerators of one node.
    """

    job: Job
    free: frozenset[str]
    per_node: int
    _contexts: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, compare=False)
    """by tp and cp, as far as they were asked for, as all that follow"""
    _schedules: dict[tuple[int, tuple[str, ...]], list[Schedule]] = field(default_factory=dict, compare=False)
    """by pp and contexts"""
    _trainings: dict[tuple[int, str], TrainingConfig] = field(default_factory=dict, compare=False)
    """by micro-batch and kind of recomputation"""
    _layouts: dict[tuple[Mesh, Sharing, Schedule], tuple[ParallelConfig, Layout]] = field(
        default_factory=dict, compare=False
    )

    def meshes(self, gpus: int) -> Iterator[Mesh]:
        """Every mesh of at most ``gpus`` that is worth a look: at most two for each number of micro-batches."""
        for widest in self.widest(gpus):
            yield widest
            yield from self.narrower(widest)

    def narrower(self, mesh: Mesh) -> Iterator[Mesh]:
        """``mesh`` with fewer data ranks, each number that is worth a look, falling."""
        if self.varies:
            for ranks in worth_a_look(self.slots, mesh.data_ranks, self.unit)[1:]:
                yield replace(mesh, data_ranks=ranks)

    def narrower_count(self, mesh: Mesh) -> int:
        """How many ``narrower`` has."""
        return len(worth_a_look(self.slots, mesh.data_ranks, self.unit)) - 1 if self.varies else 0

    def widest(self, gpus: int) -> Iterator[Mesh]:
        """The sizes of tp, pp and cp, each with as many data ranks as there is room and work for."""
        for tp, room in self._tensor_sizes(gpus):
            if self._violated(tp, 1) is None:
                for cp in self._context_sizes(room // tp):
                    if self._violated(tp, cp) is None:
                        yield from self._deeper(tp, cp, room // (tp * cp))

    def forbidden(self, gpus: int) -> Iterator[tuple[str, str]]:
        """(what limits, sentence) of each size of tp, and of cp without tp, that no mesh can have."""
        for tp, room in self._tensor_sizes(gpus):
            if (problem := self._violated(tp, 1)) is not None:
                yield problem
            elif tp == 1:
                problems = (self._violated(1, cp) for cp in self._context_sizes(room))
                yield from (problem for problem in problems if problem is not None)

    def _tensor_sizes(self, gpus: int) -> Iterator[tuple[int, int]]:
        """(tp, accelerators that whole groups of so many tensor ranks can use)."""
        per_node, most = self.per_node, min(gpus, self.per_node)
        for tp in self._sizes("tp", most, range(1, most + 1)):
            yield tp, gpus // per_node * (per_node // tp * tp) + gpus % per_node // tp * tp

    def _context_sizes(self, most: int) -> list[int]:
        return self._sizes("cp", most, divisors(self.job.data.sequence_length))

    def _deeper(self, tp: int, cp: int, room: int) -> Iterator[Mesh]:
        for pp in self._sizes("pp", room, range(1, self.job.model.num_hidden_layers + 1)):
            most = min(room // pp, self.slots) // self.unit
            if most:
                yield Mesh(tp, pp, cp, (most if self.varies else 1) * self.unit)

    def _sizes(self, axis: str, most: int, candidates: Iterable[int]) -> list[int]:
        if axis not in self.free:
            candidates = [self.given(axis)]
        elif axis != "pp" and self.job.training.determinism == "exact":
            candidates = [1]  # another size would give other bits
        return [size for size in candidates if size <= most]

    def given(self, axis: str) -> int:
        """The size that the job says, 1 where it says none."""
        return 1 if axis in self.free else int(getattr(self._smallest_layout, axis))

    @cached_property
    def _smallest_layout(self) -> Layout:
        return smallest_layout(self.job.parallel)

    def _violated(self, tp: int, cp: int) -> tuple[str, str] | None:
        """Larger axes only add constraints."""
        return violated(*self.easiest(Mesh(tp, 1, cp, 1)))

    @cached_property
    def slots(self) -> int:
        """Data ranks that can have work: each has at least a micro-batch, of the smallest size."""
        return self.job.training.global_batch // self.micro_batches()[0]

    @cached_property
    def unit(self) -> int:
        """Fixed data ranks, which divide the number of all of them."""
        return self.given("dp_replicate") * self.given("dp_shard")

    @cached_property
    def varies(self) -> bool:
        """Whether there may be any multiple of them."""
        return bool({"dp_replicate", "dp_shard"} & self.free)

    @property
    def cuts_vary(self) -> bool:
        """Whether more data ranks may share less: an ``hsdp`` that is given cuts other numbers in other ways."""
        return "data" not in self.free and self.job.parallel.data == "hsdp"

    def micro_batches(self) -> list[int]:
        """Sizes of a micro-batch, ascending."""
        return self._micro_batches

    @cached_property
    def _micro_batches(self) -> list[int]:
        if "micro_batch" not in self.free:
            return [self.job.training.micro_batch]
        total = self.job.training.global_batch
        return [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length()) if total % (1 << power) == 0]

    def ways(self, mesh: Mesh) -> Iterator[tuple[Schedule, int]]:
        """Schedules with sizes of a micro-batch of which every data rank gets one.

        Where others can run, ``gpipe`` is as slow as ``1f1b`` and larger.
        """
        for schedule in self.schedules(mesh):
            for micro_batch in self.micro_batches():
                slots = self.job.training.global_batch // micro_batch
                enough = mesh.pp == 1 or -(-slots // mesh.data_ranks) >= mesh.pp
                wanted = "pipeline" not in self.free or enough != (schedule.pipeline == "gpipe")
                if wanted and slots >= mesh.data_ranks:
                    yield schedule, micro_batch

    def schedules(self, mesh: Mesh) -> list[Schedule]:
        """Pipelines, each with each context; with one stage, or one context rank, nothing depends on them."""
        key = (mesh.pp, self.contexts(mesh.tp, mesh.cp))
        if key not in self._schedules:
            pipelines = self.pipelines(mesh.pp)
            self._schedules[key] = [each._replace(context=context) for context in key[1] for each in pipelines]
        return self._schedules[key]

    def contexts(self, tp: int, cp: int) -> tuple[str, ...]:
        """Those that can be; if none can, the one that the job has."""
        own = self.job.parallel.context
        if cp == 1 or "context" not in self.free:
            return (own,)
        if (tp, cp) not in self._contexts:
            mesh, sharing = Mesh(tp, 1, cp, 1), Sharing(self.job.parallel.data, False, 1, 1)
            first = self.pipelines(1)[0]
            possible = (
                context
                for context in CONTEXTS
                if violated(*self.question(mesh, sharing, first._replace(context=context), *self._smallest)) is None
            )
            self._contexts[tp, cp] = tuple(possible) or (own,)
        return self._contexts[tp, cp]

    @property
    def _smallest(self) -> tuple[int, str]:
        return self.micro_batches()[0], self.recomputes()[0]

    def pipelines(self, pp: int) -> list[Schedule]:
        """Schedules without regard to ``context``."""
        parallel = self.job.parallel
        own = Schedule(parallel.pipeline, parallel.virtual_stages)
        if "pipeline" not in self.free:
            if "virtual_stages" in self.free and pp > 1:
                return [each for each in SCHEDULES if each.pipeline == own.pipeline]
            return [own]
        if pp == 1:
            return [SCHEDULES[0]]
        return [
            each
            for each in SCHEDULES
            if ("virtual_stages" in self.free or each.virtual_stages == own.virtual_stages)
            and pp * each.stages_per_rank <= self.job.model.num_hidden_layers
        ]

    def recomputes(self) -> tuple[str, ...]:
        return RECOMPUTE if "recompute" in self.free else (self.job.training.recompute,)

    def sharings(self, mesh: Mesh) -> list[Sharing]:
        """Ways to share the state over the data ranks of ``mesh``.

        Under a pipeline weights are kept until its last backward pass whatever ``reshard_after_forward`` says.
        """
        found = []
        for data, reshard in SHARING:
            if "data" not in self.free and data != self.job.parallel.data:
                continue
            if "reshard_after_forward" not in self.free and reshard != self.job.parallel.reshard_after_forward:
                continue
            if "reshard_after_forward" in self.free and reshard and mesh.pp > 1:
                continue
            if data not in ("zero3", "hsdp") and self._wants_shards:
                continue
            found += [Sharing(data, reshard, *sizes) for sizes in self._cuts(data, mesh)]
        if mesh.data_ranks * mesh.cp == 1 and "data" in self.free:
            # Alone there is nothing to share; released weights come anew, from CPU memory.
            alone = [sharing for sharing in found if sharing.data == "zero3"]
            return (alone if self.job.parallel.offload else alone[:1]) or found[:1]
        return found

    @property
    def _wants_shards(self) -> bool:
        """Whether the job says what only ``zero3`` and ``hsdp`` can do (``ParallelConfig`` refuses the others)."""
        return self.job.parallel.offload or self.job.parallel.prefetch != 1

    def _cuts(self, data: str, mesh: Mesh) -> list[tuple[int, int]]:
        """(dp_replicate, dp_shard) of a strategy, whose product is the number of data ranks."""
        ranks, given = mesh.data_ranks, {"dp_replicate", "dp_shard"} - self.free
        if given and data != "ddp":
            shards = divisors(ranks)
        elif data == "hsdp":
            # Given by the user, an hsdp that only replicates or only shards is taken as it is.
            shards = self._hybrid_shards(mesh) or ([] if "data" in self.free else [ranks])
        else:
            shards = [1] if data == "ddp" else [ranks]
        cuts = [(ranks // shard, shard) for shard in shards]
        if "dp_replicate" in given:
            cuts = [cut for cut in cuts if cut[0] == self.given("dp_replicate")]
        if "dp_shard" in given:
            cuts = [cut for cut in cuts if cut[1] == self.given("dp_shard")]
        return cuts

    def _hybrid_shards(self, mesh: Mesh) -> list[int]:
        """All that replicate and shard; of many those whose shards fill a node, or a power of two of nodes."""
        shards = divisors(mesh.data_ranks)[1:-1]
        if mesh.data_ranks <= _FEW:
            return shards
        filling = {self.per_node << power for power in range(_POWERS)}
        return [shard for shard in shards if shard * mesh.cp * mesh.tp in filling]

    def question(
        self, mesh: Mesh, sharing: Sharing, schedule: Schedule, micro_batch: int, recompute: str
    ) -> tuple[Job, Layout]:
        """The job with these options, and the layout. Not validated: ``check_layout`` says what is wrong with it."""
        parallel, layout = self._layout(mesh, sharing, schedule)
        if (training := self._trainings.get((micro_batch, recompute))) is None:
            training = self.job.training.model_copy(update={"micro_batch": micro_batch, "recompute": recompute})
            self._trainings[micro_batch, recompute] = training
        return self.job.model_copy(update={"parallel": parallel, "training": training}), layout

    def _layout(self, mesh: Mesh, sharing: Sharing, schedule: Schedule) -> tuple[ParallelConfig, Layout]:
        key = (mesh, sharing, schedule)
        if (found := self._layouts.get(key)) is None:
            layout = sharing_layout(mesh, sharing)
            options = {"data": sharing.data, "reshard_after_forward": sharing.reshard_after_forward}
            update = layout.as_dict() | options | schedule._asdict()
            found = self._layouts[key] = self.job.parallel.model_copy(update=update), layout
        return found

    def easiest(self, mesh: Mesh) -> tuple[Job, Layout]:
        """The options to which the fewest constraints apply."""
        schedules = self.schedules(mesh) or SCHEDULES
        schedule = next((each for each in schedules if each.pipeline == "gpipe"), schedules[0])
        sharing = (self.sharings(mesh) or [Sharing(self.job.parallel.data, False, 1, mesh.data_ranks)])[0]
        return self.question(mesh, sharing, schedule, *self._smallest)


def space_of(job: Job, per_node: int) -> Space:
    """Free is what the job file does not write, and what it leaves to ``auto``."""
    parallel, training = job.parallel, job.training
    free = {axis for axis in AXES if axis not in parallel.model_fields_set or getattr(parallel, axis) == "auto"}
    free |= {name for name in _PARALLEL if name not in parallel.model_fields_set}
    free |= {name for name in _TRAINING if name not in training.model_fields_set}
    return Space(job, frozenset(free), per_node)
