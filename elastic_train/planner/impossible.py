"""Why no layout answers a question, and the nearest questions that have an answer: one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from elastic_train.config.job import Job
from elastic_train.config.layout import AXES
from elastic_train.planner.axis_sizes import divisors
from elastic_train.planner.constraints import violated
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.ranking import HOST_MEMORY, MEMORY, Ranking
from elastic_train.planner.search_fit import MOST_GPUS, Fit
from elastic_train.planner.search_options import Mesh
from elastic_train.planner.search_space import Space, space_of

_CHANGES = ("micro_batch", "recompute", "reshard_after_forward", "data", "cp", "tp", "pp")
"""What is set free, one at a time, where the given values need too much memory."""


def why_impossible(job: Job, gpus: int, accelerator: Accelerator, memory_limit: int, ranking: Ranking) -> str:
    """One sentence for a search that found nothing."""
    space = space_of(job, accelerator.per_node)
    sizes = {axis: size for axis in AXES if axis not in space.free and (size := getattr(job.parallel, axis)) > 1}
    data_ranks = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    problem = violated(*space.easiest(Mesh(sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("cp", 1), data_ranks)))
    if problem is not None:
        return problem[1] + _listed("; nearest: ", _nearest(space, problem[0], sizes))
    if sizes.get("tp", 1) > accelerator.per_node:
        return (
            f"parallel.tp={sizes['tp']} is more than the {accelerator.per_node} {accelerator.name} of a node, inside "
            f"which tensor ranks stay; nearest: parallel.tp={_largest_tensor_size(space)}"
        )
    given = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    smallest = smallest_that_fits(space, accelerator, memory_limit)
    if (needed := math.prod(sizes.values())) > gpus:
        return f"parallel: {given} needs {needed} GPUs, and there are {gpus}; {smallest}"
    if (memory := ranking.rejected.get(HOST_MEMORY) or ranking.rejected.get(MEMORY)) is not None:
        changes = _listed(f"; on {_gpus(gpus)} it fits with ", _changes(space, gpus, accelerator, memory_limit))
        text = f"{_gpus(gpus)} cannot hold it" if ranking.certain else f"nothing was found that fits on {_gpus(gpus)}"
        return f"{text}: {memory.example}{changes}; {smallest}"
    examples = [entry.example for entry in ranking.rejected.values()]
    return f"{examples[0] if examples else f'no layout with {given} uses {_gpus(gpus)}'}; {smallest}"


def smallest_that_fits(space: Space, accelerator: Accelerator, memory_limit: int) -> str:
    """A clause that says how few accelerators would do."""
    fewest = Fit(space, accelerator, memory_limit).fewest()
    if fewest.count is None:
        return f"no number up to {MOST_GPUS:,} would do" if fewest.certain else "no number was found that would do"
    which = "the smallest" if fewest.certain else "one"
    return f"{which} number that would do is {fewest.count}"


def _changes(space: Space, gpus: int, accelerator: Accelerator, memory_limit: int) -> Iterator[str]:
    """Single changes of the job file with which the same number of accelerators would do."""
    if space.job.parallel.offload:
        parallel = space.job.parallel.model_copy(update={"offload": False})
        kept = Space(space.job.model_copy(update={"parallel": parallel}), space.free, space.per_node)
        if Fit(kept, accelerator, memory_limit).first(gpus) is not None:
            yield "parallel.offload=false"
    for name in _CHANGES:
        if name in space.free:
            continue
        freer = Space(space.job, space.free | {name}, space.per_node)
        if (held := Fit(freer, accelerator, memory_limit).first(gpus)) is not None:
            section = "training" if name in ("micro_batch", "recompute") else "parallel"
            value = getattr(getattr(held.job, section), name)
            yield f"{section}.{name}={str(value).lower()}"


def _nearest(space: Space, limit: str, sizes: dict[str, int]) -> Iterator[str]:
    """Changes of one thing that would make the given ``sizes`` valid, or of all axes; ``limit``: what they violate."""
    found = [*_nearest_one(space, limit, sizes), *_nearest_batch(space, sizes)]
    yield from found or filter(None, [" with ".join(_nearest_together(space, sizes))])


def _nearest_batch(space: Space, sizes: dict[str, int]) -> Iterator[str]:
    """Where there are more data ranks than slots: fewer of them, or more sequences."""
    micro_batch = space.micro_batches()[0]
    slots = space.job.training.global_batch // micro_batch
    replicas, shards = sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1)
    if replicas * shards <= slots:
        return
    axis, other = ("dp_shard", replicas) if shards > 1 else ("dp_replicate", shards)
    if other <= slots:
        yield f"parallel.{axis}={slots // other}"
    yield f"training.global_batch={replicas * shards * micro_batch}"


def _nearest_together(space: Space, sizes: dict[str, int]) -> Iterator[str]:
    """The largest sizes that are valid together, axis by axis."""
    taken = {"tp": 1, "cp": 1, "pp": 1}
    for axis in taken:
        if axis in sizes:
            smaller = [size for size in _candidates(space, axis) if size <= sizes[axis]]
            fitting = (size for size in reversed(smaller) if _valid(space, **(taken | {axis: size})))
            taken[axis] = next(fitting, 1)
            yield f"parallel.{axis}={taken[axis]}"


def _nearest_one(space: Space, limit: str, sizes: dict[str, int]) -> Iterator[str]:
    job = space.job
    for axis in ("tp", "cp", "pp"):
        given = sizes.get(axis, 1)
        valid = partial(_valid_size, space, axis)
        if given > 1 and (found := _nearest_to(given, valid, _candidates(space, axis))):
            yield f"parallel.{axis}={found}"
    cp = sizes.get("cp", 1)
    if limit == "sequence_length" and cp <= job.data.sequence_length:
        length = job.data.sequence_length
        if found := _nearest_to(length, lambda size: _valid(space, length=size), range(cp, 2 * length + 1, cp)):
            yield f"data.sequence_length={found}"


def _nearest_to(number: int, valid: Callable[[int], bool], candidates: Sequence[int]) -> int | None:
    """The candidate with the least difference, the smaller of two, that is another number and valid."""
    ordered = sorted(candidates, key=lambda other: (abs(other - number), other))
    return next((other for other in ordered if other != number and valid(other)), None)


def _candidates(space: Space, axis: str) -> Sequence[int]:
    """Sizes of the axis that are valid for some batch, and perhaps others, ascending."""
    job = space.job
    if axis == "cp":
        return divisors(job.data.sequence_length)
    return range(1, 1 + (job.model.num_key_value_heads if axis == "tp" else job.model.num_hidden_layers))


def _valid(space: Space, *, length: int | None = None, **sizes: int) -> bool:
    fixed = {axis: space.given(axis) for axis in ("tp", "pp", "cp")}
    if length is not None:
        data = space.job.data.model_copy(update={"sequence_length": length})
        space = Space(space.job.model_copy(update={"data": data}), space.free, space.per_node)
    return violated(*space.easiest(Mesh(**(fixed | sizes), data_ranks=1))) is None


def _valid_size(space: Space, axis: str, size: int) -> bool:
    return _valid(space, **{axis: size})


def _largest_tensor_size(space: Space) -> int:
    sizes = range(space.per_node, 0, -1)
    return next(size for size in sizes if size == 1 or violated(*space.easiest(Mesh(size, 1, 1, 1))) is None)


def _listed(prefix: str, items: Iterator[str]) -> str:
    text = " or ".join(items)
    return f"{prefix}{text}" if text else ""


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
