"""The least time that a mesh can take, in no time: what a search need not look at.

Products of the slowest pipeline rank with the exchanges of tensor and context parallelism, and the passes of the others
that fill and drain the pipeline, as in ``planner.step_time``; without what is sent from stage to stage or computed
again, and of what is done for the state only what nothing can hide, where it is known how that is shared. So no step
is estimated to take less.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.planner.compute_time import pass_times
from elastic_train.planner.constraints import equal_rounds
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.parameters import blocks_of_ranks, stages_of_ranks
from elastic_train.planner.rank_time import waits_for_state
from elastic_train.planner.search_options import Mesh, Schedule, Sharing
from elastic_train.planner.search_space import Space
from elastic_train.planner.traffic import telling_ranks
from elastic_train.planner.traffic_activations import activation_exchanges
from elastic_train.planner.transfer import transfer_seconds


class Floor:
    """Of one space on one accelerator; remembers what it has computed."""

    def __init__(self, space: Space, accelerator: Accelerator) -> None:
        self._space, self._accelerator = space, accelerator.for_job(space.job, 1)  # with fewer ranks no slower
        self._ranks: dict[tuple[int, tuple[str, int]], set[tuple[int, int]]] = {}
        self._passes: dict[tuple[int, int, str, int], tuple[float, float]] = {}
        self._states: dict[tuple[Mesh, tuple[str, int], int, Sharing], float] = {}

    def of(self, mesh: Mesh) -> float:
        """Seconds of a step with the schedule and the micro-batch that are fastest."""
        size = self._space.micro_batches()[0]
        found = []
        for schedule in self._space.schedules(mesh):
            block, head = self._at_least(mesh.tp, mesh.cp, schedule.context)
            found.append(self._seconds(mesh, schedule, size, (block * size, head * size)))
        return min(found, default=0.0)

    def of_way(self, mesh: Mesh, schedule: Schedule, micro_batch: int) -> float:
        """Seconds of a step."""
        return self._seconds(
            mesh, schedule, micro_batch, self._of_passes(mesh.tp, mesh.cp, schedule.context, micro_batch)
        )

    def of_sharing(self, mesh: Mesh, schedule: Schedule, micro_batch: int, sharing: Sharing) -> float:
        """Seconds of a step."""
        passes = self._of_passes(mesh.tp, mesh.cp, schedule.context, micro_batch)
        return self._seconds(mesh, schedule, micro_batch, passes, self._of_state(mesh, schedule, micro_batch, sharing))

    def _seconds(
        self, mesh: Mesh, schedule: Schedule, micro_batch: int, passes: tuple[float, float], state: float = 0.0
    ) -> float:
        """``passes``: of a micro-batch in a block, with what it exchanges, and in the head; ``state``: of a step."""
        block, head = passes
        count = -(-(self._space.job.training.global_batch // micro_batch) // mesh.data_ranks)
        count = equal_rounds(count, mesh.pp, schedule.pipeline)
        slowest = max(blocks * block + heads * head for blocks, heads in self._held(mesh.pp, schedule))
        together = self._space.job.model.num_hidden_layers * block + head
        overlap = schedule.stages_per_rank * (3 if schedule.splits_backward else 1)
        share = self._accelerator.sharing(mesh.world_size)
        chain = count * slowest + (together - slowest) / overlap + state
        return max(chain, (count * together / mesh.pp + state) * share)

    def _of_state(self, mesh: Mesh, schedule: Schedule, micro_batch: int, sharing: Sharing) -> float:
        """Of the pipeline rank that waits least for its state."""
        key = (mesh, schedule[:2], micro_batch, sharing)
        if key not in self._states:
            job, layout = self._space.question(mesh, sharing, schedule, micro_batch, self._space.recomputes()[0])
            chip, ranks = self._accelerator, telling_ranks(job, layout)
            self._states[key] = min(
                waits_for_state(job, layout, chip, chip.efficiency, number, stages) for number, stages in ranks.items()
            )
        return self._states[key]

    def _held(self, pp: int, schedule: Schedule) -> set[tuple[int, int]]:
        """(blocks, heads) of the pipeline ranks."""
        key = (pp, schedule[:2])
        if key not in self._ranks:
            job = self._space.job
            ranks = blocks_of_ranks(job.model, job.data.sequence_length, *schedule[:2], pp)
            # None are valid if there is no block for every stage: a constraint says so.
            self._ranks[key] = {(rank.blocks, int(rank.last)) for rank in ranks} or {(0, 0)}
        return self._ranks[key]

    def _of_passes(self, tp: int, cp: int, context: str, micro_batch: int) -> tuple[float, float]:
        """Seconds of one micro-batch in a block, with what that exchanges along tp and cp, and in the head."""
        key = (tp, cp, context, micro_batch)
        if key not in self._passes:
            chip, sharing = self._accelerator, Sharing("ddp", False, 1, 1)
            way = (Schedule(context=context), micro_batch, self._space.recomputes()[0])
            job, layout = self._space.question(Mesh(tp, 1, cp, 1), sharing, *way)
            times = pass_times(job, layout, chip, chip.efficiency)
            (whole,) = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length, job.lora)[0]
            block = replace(whole, blocks=1, first=False, last=False)
            found = activation_exchanges(job, layout, 0, [block], 1)
            each = sum(transfer_seconds(exchange, layout, chip) for exchange in found) + 2 * chip.block_seconds
            each += times.forward + times.backward + times.again
            self._passes[key] = each, times.head_forward + times.head_backward
        return self._passes[key]

    def _at_least(self, tp: int, cp: int, context: str) -> tuple[float, float]:
        """Per sample: of the largest micro-batch, as nothing of a pass grows by more than its samples."""
        size = self._space.micro_batches()[-1]
        block, head = self._of_passes(tp, cp, context, size)
        return block / size, head / size
