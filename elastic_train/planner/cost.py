"""How long a step of a layout takes, relative to other layouts of the same job: a simple, stated estimate.

One unit is the time of one micro-batch through the whole model on one host, forward and backward.

``(m + bubble) x dearest stage / (tp x cp) x (1 + 0.3 (tp - 1)/tp + 0.3 (cp - 1)/cp + 0.05 if pp > 1)
+ 0.25 (d - 1)/d / (pp x tp)``

``m``: micro-batches per data rank, slots rounded up (padding included). ``bubble``: ``pp - 1`` micro-batches, divided
by the stages per rank where they are interleaved and by 3 where the backward pass is split (arXiv:2401.10241).
``dearest stage``: its share of the model's operations. ``d``: ranks over which gradients are reduced, once a step (data
ranks x cp). The four weights of communication are fixed numbers of the size one sees, so that idle slots and bubbles
decide, then ``tp`` and ``cp``, which exchange activations in every block. They are not measurements of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.stage_split import layer_costs, split_layers, stage_costs, stages_of_rank, total_stages

_TENSOR, _CONTEXT, _PIPELINE, _GRADIENTS = 0.3, 0.3, 0.05, 0.25


@dataclass(frozen=True, slots=True)
class StepCost:
    """The terms of a step's time, in micro-batches of the whole model on one host."""

    compute: float
    bubble: float
    exchange: float
    """of activations, along tp, cp and pp"""
    gradients: float

    @property
    def communication(self) -> float:
        return self.exchange + self.gradients

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.communication


class CostModel:
    """Costs of one job's layouts; remembers the dearest stage of each number of stages."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._dearest: dict[int, float] = {}

    def step(self, layout: Layout) -> StepCost:
        """The cost of ``layout``, which may violate constraints as long as there is a layer for every stage."""
        parallel = self._job.parallel
        count = micro_batches_per_rank(self._job, layout)
        each = self._dearest_rank(layout.pp) / (layout.tp * layout.cp)
        idle = layout.pp - 1.0
        if layout.pp > 1:
            idle /= parallel.stages_per_rank * (3 if parallel.splits_backward else 1)
        inner = _TENSOR * (layout.tp - 1) / layout.tp + _CONTEXT * (layout.cp - 1) / layout.cp
        inner += _PIPELINE if layout.pp > 1 else 0.0
        peers = layout.data_ranks * layout.cp
        gradients = _GRADIENTS * (peers - 1) / peers / (layout.pp * layout.tp)
        return StepCost(count * each, idle * each, (count + idle) * each * inner, gradients)

    def _dearest_rank(self, pp: int) -> float:
        """Share of the model's operations that the busiest pipeline rank has."""
        if pp not in self._dearest:
            job = self._job
            stages = total_stages(job.parallel, pp)
            costs = layer_costs(job.model, job.data.sequence_length)
            counts = [len(layers) for layers in split_layers(job.model.num_hidden_layers, stages, costs)]
            spent = stage_costs(counts, costs)
            ranks = [sum(spent[stage] for stage in stages_of_rank(job.parallel, pp, rank)) for rank in range(pp)]
            self._dearest[pp] = max(ranks) / sum(ranks)
        return self._dearest[pp]
