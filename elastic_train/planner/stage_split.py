"""Which blocks a pipeline stage holds, and which stages a rank: a pure function of model, sequence and axis sizes.

Costs are floating point operations of forward and backward per token, as ``6 x parameters`` of the matrices that a
token is multiplied with plus ``12 x heads x head size x tokens`` of attention per block (arXiv:2204.02311, appendix B).
The head is such a matrix, ``6 x vocabulary x hidden size``, and easily as dear as two blocks. The embedding is none: a
token copies one row, and adds one row to the gradient.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from elastic_train.config.model import ModelConfig
from elastic_train.config.parallel import ParallelConfig


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Floating point operations per token, forward and backward."""

    block: int
    embedding: int
    head: int


def layer_costs(model: ModelConfig, sequence_length: int) -> LayerCosts:
    """Costs of one block at full ``sequence_length``, of the embedding and of the head; norms are left out."""
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_size
    keys = model.num_key_value_heads * model.head_size
    matrices = hidden * (2 * queries + 2 * keys + 3 * model.intermediate_size)
    block = 6 * matrices + 12 * queries * sequence_length
    return LayerCosts(block, 2 * hidden, 6 * model.vocab_size * hidden)


def split_layers(layers: int, stages: int, costs: LayerCosts) -> list[range]:
    """Contiguous layers of every stage, at least one each, such that the dearest stage is as cheap as can be.

    Among those splits the one with the most even costs. Each further layer goes to the stage that costs least so far,
    to the first of equals: as all layers cost the same, this minimises every sum of a convex function of the costs.
    Raises ValueError if there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages: each needs at least one")
    counts = [1] * stages
    cheapest = [(spent, stage) for stage, spent in enumerate(stage_costs(counts, costs))]
    heapq.heapify(cheapest)
    for _ in range(layers - stages):
        spent, stage = cheapest[0]
        heapq.heapreplace(cheapest, (spent + costs.block, stage))
        counts[stage] += 1
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def stage_costs(counts: list[int], costs: LayerCosts) -> list[int]:
    """Cost of every stage with so many layers; the first one also embeds, the last one also has the head."""
    spent = [count * costs.block for count in counts]
    spent[0] += costs.embedding
    spent[-1] += costs.head
    return spent


def total_stages(parallel: ParallelConfig, pp: int) -> int:
    """Stages of the whole model on ``pp`` pipeline ranks."""
    return pp * parallel.stages_per_rank if pp > 1 else 1


def stages_of_rank(parallel: ParallelConfig, pp: int, rank: int) -> list[int]:
    """The stages of pipeline rank ``rank``, ascending: dealt out in turn, or down and up again (V) for ``zbv``."""
    if parallel.pipeline == "zbv" and pp > 1:
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, total_stages(parallel, pp), pp))
