"""Where every rank of a layout has which part of a state, worked out without ranks, by the functions that ranks use."""

from __future__ import annotations

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.shard import Box, chunk_bounds, cuts_of, local_box
from elastic_train.parallel.stages import stages_of
from elastic_train.parallel.tensor import tensor_dim
from elastic_train.planner.stage_split import layer_costs, split_layers
from elastic_train.training.optimizer import state_kinds

Partition = dict[str, Box]
"""State key -> the box that a rank has of that tensor, perhaps an empty one."""


def layouts_up_to(ranks: int) -> list[Layout]:
    """All (pp, dp, tp) of at most so many ranks, data ranks sharding."""
    sizes = range(1, ranks + 1)
    return [Layout(pp=pp, dp_shard=dp, tp=tp) for pp in sizes for dp in sizes for tp in sizes if pp * dp * tp <= ranks]


def partition(job: Job, layout: Layout, rank: int) -> Partition:
    """``{key: box}`` of parameters and moments, as ``data=zero3`` has them.

    Defined for layouts that ``check_layout`` refuses too: heads are then cut anywhere, and where there are more stages
    than layers the last ones have none.
    """
    place = layout.coordinates(rank)
    layers = _layers(job, layout.pp, place.pp)
    stage = Transformer(job.model, layers=layers, first=place.pp == 0, last=place.pp == layout.pp - 1)
    return {
        f"{kind}.{name}": local_box(shape, cuts_of(tensor_dim(name), layout, place, sharded=True))
        for name, shape in stages_of([stage]).shapes.items()
        for kind in ("param", *state_kinds(job.optimizer, name, len(shape)))
    }


def _layers(job: Job, pp: int, stage: int) -> range:
    count = job.model.num_hidden_layers
    if count < pp:
        return range(*chunk_bounds(count, pp, stage))
    return split_layers(count, pp, layer_costs(job.model, job.data.sequence_length))[stage]


def shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor of the state."""
    return {key: box.sizes for key, box in partition(job, Layout(), 0).items()}
