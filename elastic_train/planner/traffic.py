"""What a rank sends in a step, exchange by exchange: exactly what the engine's collectives carry.

A test counts the bytes of the real collectives on eight ranks and compares. The formulas are those of
docs/parallelism.md; ``traffic_state`` has the data axes, ``traffic_activations`` tensor, context and pipeline axes.
Left out: evaluations, checkpoints, and the copies of snapshots that hosts send each other beside the steps.
"""

from __future__ import annotations

from functools import lru_cache

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.exchange import Exchange, exchange, real
from elastic_train.planner.parameters import StageParameters, stages_of_ranks
from elastic_train.planner.traffic_activations import activation_exchanges
from elastic_train.planner.traffic_state import state_exchanges


def traffic_of(job: Job, layout: Layout, pipeline_rank: int | None = None) -> list[Exchange]:
    """Exchanges of a step of one rank, the first of all axes but pp; None: of the pipeline rank that sends most."""
    if pipeline_rank is not None:
        ranks = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length, job.lora)
        return rank_traffic(job, layout, pipeline_rank, ranks[pipeline_rank])
    return max(
        (rank_traffic(job, layout, number, stages) for number, stages in telling_ranks(job, layout).items()),
        key=lambda exchanges: sum(each.sent_bytes for each in exchanges),
    )


def telling_ranks(job: Job, layout: Layout) -> dict[int, list[StageParameters]]:
    """Pipeline ranks one of which has most of anything, and their stages: the ends, and the fullest between them."""
    return _telling(job.model, job.parallel, layout, job.data.sequence_length, job.lora)


@lru_cache(maxsize=4096)
def _telling(
    model: ModelConfig, parallel: ParallelConfig, layout: Layout, sequence: int, lora: LoraConfig | None
) -> dict[int, list[StageParameters]]:
    ranks = stages_of_ranks(model, parallel, layout, sequence, lora)
    last = len(ranks) - 1
    middle = max(range(1, last), key=lambda rank: sum(stage.blocks for stage in ranks[rank])) if last > 1 else last
    return {number: ranks[number] for number in sorted({0, middle, last})}


def rank_traffic(job: Job, layout: Layout, number: int, stages: list[StageParameters]) -> list[Exchange]:
    """Exchanges of pipeline rank ``number``, which holds ``stages``."""
    return pass_traffic(job, layout, number, stages) + state_traffic(job, layout, number, stages)


def pass_traffic(job: Job, layout: Layout, number: int, stages: list[StageParameters]) -> list[Exchange]:
    """Of activations, whatever ``parallel.data`` and its axes."""
    count = micro_batches_per_rank(job, layout)
    return real(activation_exchanges(job, layout, number, stages, count))


def state_traffic(job: Job, layout: Layout, number: int, stages: list[StageParameters]) -> list[Exchange]:
    """Of weights and gradients, and what is told of a step."""
    count = micro_batches_per_rank(job, layout)
    return real([*state_exchanges(job, layout, number, stages, count), *_bookkeeping(job, layout)])


def _bookkeeping(job: Job, layout: Layout) -> list[Exchange]:
    """Valid tokens of the step, then its loss and gradient norm."""
    counted = exchange(layout, "batch", "valid tokens", "all_reduce", 1, 8, "int64")
    if job.training.determinism == "default":
        return [counted, exchange(layout, "world", "loss and gradient norm", "all_reduce", 1, 16, "float64")]
    # Losses by slot, and the squared norm as four digits.
    digits = 8 * (job.training.slots * layout.cp + 4)
    return [
        counted,
        exchange(layout, "world", "largest gradient", "all_reduce", 1, 16, "float64"),
        exchange(layout, "world", "losses and gradient norm", "all_reduce", 1, digits, "int64"),
    ]
