"""Which layout a job gets on the hosts that are there. Plain Python, exhaustive and deterministic.

Every combination of axis sizes that keeps the fixed axes, the constraints and ``hosts.memory`` competes by the seconds
of ``planner.step_time`` on ``hardware.host_of`` the job's device; among equals the one with fewer hosts wins, then
smaller tp, pp, cp and dp_replicate. Tensor ranks sit on one node, so a node gives a multiple of ``tp`` hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic_train.config.job import Job
from elastic_train.config.layout import AXES, Layout
from elastic_train.planner.axis_sizes import layouts_of, smallest_layout
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import host_of
from elastic_train.planner.layout_search import LayoutSearch, preference
from elastic_train.planner.machines import Machine
from elastic_train.planner.step_time import step_time

Nodes = int | Sequence[int]
"""Hosts that are there: of each node, or how many there are on one node."""


class NoLayout(Exception):
    """No layout fits; the message says why and what number of hosts would do."""


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout, how many hosts it uses, how many stay warm spares, and why it was taken (sentences)."""

    layout: Layout
    used_hosts: int
    spares: int
    reasons: list[str] = field(default_factory=list)
    cost: float = 0.0
    """estimated seconds of a step"""
    accelerator: Accelerator | None = field(default=None, compare=False)
    """for which ``cost`` was estimated"""

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


def choose_layout(job: Job, nodes: Nodes, most: int | None = None, machine: Machine | None = None) -> LayoutChoice:
    """The cheapest valid layout on ``nodes`` with at most ``most`` ranks (default: all of them). Raises NoLayout.

    ``machine``: what the hosts are; None: not known, then only ``hosts.memory`` limits what they hold.
    """
    nodes = [nodes] if isinstance(nodes, int) else list(nodes)
    most = min(sum(nodes), sum(nodes) if most is None else most)
    search = LayoutSearch(job, max(nodes, default=1), machine)
    found = search.best(nodes, most)
    if not found:
        raise NoLayout(_nothing_fits(job, search, nodes, most))
    layout = found[0]
    reasons = _reasons(job, search, found, nodes, most)
    seconds = search.time(layout).total
    reasons += machine.said if machine is not None else ()
    spares = sum(nodes) - layout.world_size
    return LayoutChoice(layout, layout.world_size, spares, reasons, seconds, search.accelerator)


def step_seconds(job: Job, layout: Layout, accelerator: Accelerator | None = None) -> float:
    """The estimate that layouts are chosen by; ``accelerator``: default that of the job's device."""
    return step_time(job, layout, accelerator or host_of(job.hosts.device)).total


def choose_for_all(job: Job, hosts: int) -> LayoutChoice:
    """The cheapest valid layout of exactly ``hosts`` ranks on one node: none may be idle. Raises NoLayout."""
    search = LayoutSearch(job, hosts)
    layouts = layouts_of(job.parallel, hosts)
    valid = [layout for layout in layouts if not check_layout(job, layout) and not search.too_large(layout)]
    if not valid:
        raise NoLayout(f"no layout of this job uses all of {_hosts(hosts)}")
    best = min(valid, key=lambda layout: preference(job.parallel, layout, search.time(layout)))
    return LayoutChoice(best, hosts, 0, [], search.time(best).total, search.accelerator)


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


def _nothing_fits(job: Job, search: LayoutSearch, nodes: Sequence[int], most: int) -> str:
    smallest = smallest_layout(job.parallel)
    problems = check_layout(job, smallest)
    if problems:
        return f"no number of hosts can run layout {smallest}: {'; '.join(problems)}"
    spread = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    if smallest.world_size > most:
        fixed = " x ".join(f"parallel.{axis}={size}" for axis, size in smallest.as_dict().items() if size > 1)
        text = f"{_hosts(most)}{spread} cannot hold {fixed}: at least {_hosts(smallest.world_size)} are needed"
    elif smallest.tp > max(nodes, default=0):
        text = f"parallel.tp={smallest.tp} needs as many hosts on one node; the fullest of the nodes has {max(nodes)}"
    else:
        text = f"{_hosts(most)}{spread} cannot run this job"
        least = search.least_memory(nodes, most)
        if least is not None and (problem := search.too_large(least)) is not None:
            text += f": {problem}"
    would = search.would_do(nodes, most)
    return f"{text}; {f'{_hosts(would)} would do' if would else f'none up to hosts.max={job.hosts.max} would do'}"


def _reasons(job: Job, search: LayoutSearch, found: list[Layout], nodes: Sequence[int], most: int) -> list[str]:
    layout = found[0]
    time = search.time(layout)
    fixed = [f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(job.parallel, axis) not in ("auto", 1)]
    reasons = [f"{', '.join(fixed)} given in the job file"] if fixed else []
    there = f"{_hosts(sum(nodes))}{f' on {len(nodes)} nodes' if len(nodes) > 1 else ''}"
    reasons.append(
        f"{there}: {layout} takes {_seconds(time.total)} a step by estimate "
        f"(compute {_seconds(time.total - time.idle - time.exposed)}, bubble {_seconds(time.idle)}, "
        f"waiting for exchanges {_seconds(time.exposed)})"
    )
    for second in found[1:]:
        reasons.append(f"next best {second} takes {_seconds(search.time(second).total)}")
    slots, ranks, count = job.training.slots, layout.data_ranks, micro_batches_per_rank(job, layout)
    if padding := ranks * count - slots:
        reasons.append(f"{slots} slots over {ranks} data ranks of {count} micro-batches each: {padding} are padding")
    if spares := sum(nodes) - layout.world_size:
        reasons.append(
            f"{_hosts(spares)} kept as warm spares: {_why_spares(job, search, layout, min(most, sum(nodes)))}"
        )
    return reasons


def _why_spares(job: Job, search: LayoutSearch, layout: Layout, most: int) -> str:
    """What the layout with more data ranks would be like, if there is one."""
    axis = "dp_shard" if job.parallel.dp_shard == "auto" else "dp_replicate"
    each = layout.world_size // getattr(layout, axis)
    other = min(most, job.training.slots * each // max(1, layout.data_ranks // getattr(layout, axis))) // each
    wider = replace(layout, **{axis: other})
    if getattr(job.parallel, axis) != "auto" or other <= getattr(layout, axis) or check_layout(job, wider):
        return "no valid layout that uses more is faster"
    count = micro_batches_per_rank(job, wider)
    return f"{wider} takes {_seconds(search.time(wider).total)}, with {count} micro-batches on a data rank"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"
