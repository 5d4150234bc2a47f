"""Bytes that a rank holds at most during a step, term by term, to be held against ``hosts.memory``.

State between steps is ``planner.model_state``, exact. What comes and goes is looked at in the moments at which it can
be most: at the loss, where all activations and logits are there; in the backward pass of the block that comes first
in it; at the end of the backward pass; and in the update. The moment with the largest sum counts. Lifetimes are those
of this engine and of FSDP2 as torch 2.13 has it; the tests let the real engine run a step over tensors without data.

On top come what the process itself takes on a device (``RUNTIME``) and what allocators waste (``SLACK``). Not counted:
images of snapshots, which are files in memory; the whole matrix that Muon's update works on; workspaces of kernels.
What ``parallel.offload`` puts into CPU memory is ``planner.host_memory``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32
from elastic_train.planner.host_memory import host_terms
from elastic_train.planner.model_state import numbers_of
from elastic_train.planner.parameters import StageParameters, stages_of_ranks
from elastic_train.planner.step_memory import StepMemory, Terms

SLACK = {"cpu": 1.0, "cuda": 0.05}
"""Fraction of what comes and goes that the allocator holds beside it, by device. On cpu glibc keeps what was freed:
measured 0.6 to 1.5 at the size of the quickstart, and 0 with MALLOC_MMAP_THRESHOLD_=65536. On cuda an assumption."""
SLACK_LIMIT = {"cpu": 256 * 2**20, "cuda": None}
"""Pieces of 32 MiB and more glibc maps one by one, and gives them back."""
RUNTIME = {"cpu": 0, "cuda": 2**30}
"""CUDA context and NCCL's channels; a round number, not measured. On cpu a process' own memory is not counted."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The first rank of every other axis on one pipeline rank, which holds most of what divides unevenly."""

    stages: tuple[int, ...]
    state: dict[str, int]
    """Bytes between two steps; with ``parallel.offload`` in CPU memory, and not among ``terms``."""
    terms: dict[str, int]
    """Bytes at ``moment``; those of ``state`` that are not there yet or no more are left out."""
    moment: str
    """When in a step most is held."""
    host: dict[str, int]
    """Bytes of CPU memory; {} without ``parallel.offload``."""
    moments: tuple[Terms, ...] = field(repr=False)
    """All that were looked at."""

    @property
    def largest(self) -> dict[str, int]:
        """Bytes of every term when it is largest. Not all are at the same moment: their sum is more than ``total``."""
        found = Terms()
        for held in self.moments:
            found.at_least(held)
        return found

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.terms.values())


def memory_of(job: Job, layout: Layout) -> tuple[RankMemory, ...]:
    """One per pipeline rank. ``layout`` has a layer for every stage; other constraints may be violated."""
    ranks = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length, job.lora)
    return tuple(_rank_memory(job, layout, number, stages) for number, stages in enumerate(ranks))


def _rank_memory(job: Job, layout: Layout, number: int, stages: list[StageParameters]) -> RankMemory:
    step, device = StepMemory(job, layout, number, stages), job.hosts.device
    moments = list(step.moments())
    if job.parallel.offload:  # the state is elsewhere, but for the parts that are on their way to be gathered
        ahead = 1 + job.parallel.prefetch
        away = {*step.state, "gradients in float32"}
        part, trained = (max(stage.block.part for stage in each) for each in (stages, [s.trained for s in stages]))
        copied = {"copies from CPU memory": ahead * (FLOAT32 * trained + numbers_of(job).compute * (part - trained))}
        moments = [
            (name, Terms({t: size for t, size in held.items() if t not in away} | copied)) for name, held in moments
        ]
    moment, found = max(moments, key=lambda entry: entry[1].total())
    transient = sum(size for name, size in found.items() if name not in step.state)
    slack, limit = int(SLACK[device] * transient), SLACK_LIMIT[device]
    terms = {**found, "runtime": RUNTIME[device], "allocator slack": slack if limit is None else min(slack, limit)}
    held = {name: size for name, size in terms.items() if size}
    numbers, host = tuple(stage.stage for stage in stages), host_terms(job, layout, stages)
    return RankMemory(numbers, step.state, held, moment, host, tuple(each for _, each in moments))


def memory_bytes(job: Job, layout: Layout) -> int:
    """Bytes of the pipeline rank that needs most."""
    return fullest_rank(job, layout).total


def fullest_rank(job: Job, layout: Layout) -> RankMemory:
    """The pipeline rank that needs most."""
    ranks = stages_of_ranks(job.model, job.parallel, layout, job.data.sequence_length, job.lora)
    # Of ranks with equal stages one keeps most micro-batches, the first, with zbv the last: the others need no look.
    order = range(layout.pp) if job.parallel.pipeline == "zbv" else range(layout.pp)[::-1]
    different = {tuple((stage.blocks, stage.first, stage.last) for stage in ranks[n]): n for n in order}
    found = [_rank_memory(job, layout, number, ranks[number]) for number in different.values()]
    return max(found, key=lambda rank: rank.total)
