"""Which layout a job gets on a given number of hosts. Plain Python, exhaustive and deterministic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_train.config.job import Job
from elastic_train.config.layout import AXES, Layout
from elastic_train.config.parallel import ParallelConfig
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank


class NoLayout(Exception):
    """No layout fits; the message says why and what number of hosts would do."""


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout, how many hosts it uses, how many stay warm spares, and why it was taken (sentences)."""

    layout: Layout
    used_hosts: int
    spares: int
    reasons: list[str] = field(default_factory=list)


def choose_layout(job: Job, hosts: int) -> LayoutChoice:
    """The best valid layout with at most ``hosts`` ranks; fixed axes are kept, ``auto`` axes are free.

    Order of preference: most hosts used, smaller tp, smaller pp, smaller dp_replicate (sharding saves memory and costs
    no more traffic at this size); but ``hsdp`` both replicates and shards, where the hosts allow it. Raises NoLayout.
    """
    parallel = job.parallel
    smallest = smallest_layout(parallel)
    problems = check_layout(job, smallest)
    if problems:
        raise NoLayout(f"no number of hosts can run layout {smallest}: {'; '.join(problems)}")
    if smallest.world_size > hosts:
        fixed = " x ".join(f"parallel.{axis}={size}" for axis, size in _fixed(parallel).items() if size > 1)
        raise NoLayout(f"{_hosts(hosts)} cannot hold {fixed}: at least {smallest.world_size} hosts are needed")
    for world in range(min(hosts, _largest_world(job)), 0, -1):
        valid = [layout for layout in layouts_of(parallel, world) if not check_layout(job, layout)]
        if valid:
            best = min(valid, key=lambda layout: _preference(parallel, layout))
            return LayoutChoice(best, world, hosts - world, _reasons(job, best, hosts))
    raise NoLayout(f"{_hosts(hosts)} cannot run this job; {smallest.world_size} would do")


def _preference(parallel: ParallelConfig, layout: Layout) -> tuple[int, ...]:
    one_sided = parallel.data == "hsdp" and 1 in (layout.dp_replicate, layout.dp_shard)
    return (layout.tp, layout.pp, layout.cp, one_sided, layout.dp_replicate)


def check_job(job: Job) -> list[str]:
    """Why the job cannot run with its fixed axes or on ``hosts.min`` hosts; empty when it can."""
    problems = check_layout(job, smallest_layout(job.parallel))
    if problems:
        return [f"parallel: {problem}" for problem in problems]
    try:
        choose_layout(job, job.hosts.min)
    except NoLayout as error:
        return [f"hosts.min={job.hosts.min}: {error}"]
    return []


def _largest_world(job: Job) -> int:
    """An upper bound of the ranks of a valid layout: an axis ends where there is nothing left to give out."""
    parallel, model = job.parallel, job.model
    most = {"pp": model.num_hidden_layers, "cp": job.data.sequence_length, "tp": model.num_key_value_heads}
    sizes = [most[axis] if getattr(parallel, axis) == "auto" else getattr(parallel, axis) for axis in most]
    return job.training.slots * math.prod(sizes)


def smallest_layout(parallel: ParallelConfig) -> Layout:
    """The fixed axes, every ``auto`` axis at 1: the easiest to satisfy, as larger axes only add constraints."""
    return Layout(**_fixed(parallel))


def layouts_of(parallel: ParallelConfig, world: int) -> Iterator[Layout]:
    """All layouts of exactly ``world`` ranks that keep the fixed axes, valid for a model or not."""
    fixed = _fixed(parallel)
    rest, remainder = divmod(world, math.prod(fixed.values()))
    if remainder:
        return
    free = [axis for axis in AXES if getattr(parallel, axis) == "auto"]
    for sizes in _factorizations(rest, len(free)):
        yield Layout(**{**fixed, **dict(zip(free, sizes, strict=True))})


def _fixed(parallel: ParallelConfig) -> dict[str, int]:
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    return {axis: 1 if size == "auto" else size for axis, size in sizes.items()}


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write ``number`` as a product of ``parts`` factors."""
    if parts == 0:
        if number == 1:
            yield ()
        return
    for factor in _divisors(number) if parts > 1 else (number,):
        for others in _factorizations(number // factor, parts - 1):
            yield (factor, *others)


def _divisors(number: int) -> list[int]:
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


def _reasons(job: Job, layout: Layout, hosts: int) -> list[str]:
    parallel = job.parallel
    fixed = [f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(parallel, axis) not in ("auto", 1)]
    free = [f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(parallel, axis) == "auto"]
    reasons = []
    if fixed:
        reasons.append(f"{', '.join(fixed)} given in the job file")
    if free:
        reasons.append(f"{', '.join(free)} chosen to use {layout.world_size} of {_hosts(hosts)}")
    slots, ranks, count = job.training.slots, layout.data_ranks, micro_batches_per_rank(job, layout)
    if padding := ranks * count - slots:
        reasons.append(f"{slots} slots over {ranks} data ranks of {count} micro-batches each: {padding} are padding")
    if hosts > layout.world_size:
        reasons.append(f"{_hosts(hosts - layout.world_size)} kept as warm spares: no valid layout uses more")
    return reasons


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"
