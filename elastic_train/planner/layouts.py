"""Which layout a job gets on the hosts that are there. Plain Python, exhaustive and deterministic.

Every combination of axis sizes that keeps the fixed axes, the constraints and ``hosts.memory`` competes by the seconds
of ``planner.step_time`` on ``hardware.host_of`` the job's device; among equals the one with fewer hosts wins, then
smaller tp, pp, cp and dp_replicate. Tensor ranks sit on one node, so a node gives a multiple of ``tp`` hosts.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from elastic_train.config.job import Job
from elastic_train.config.layout import AXES, Layout
from elastic_train.config.parallel import ParallelConfig
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank
from elastic_train.planner.data_ranks import equal_spans
from elastic_train.planner.hardware import host_of
from elastic_train.planner.memory import memory_bytes
from elastic_train.planner.search_bound import Floor
from elastic_train.planner.search_space import Mesh, Space
from elastic_train.planner.step_time import StepTime, step_time

Nodes = int | Sequence[int]
"""Hosts that are there: of each node, or how many there are on one node."""
_DIGITS = 9
"""of seconds: below that they are equal"""


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

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


def choose_layout(job: Job, nodes: Nodes, most: int | None = None) -> LayoutChoice:
    """The cheapest valid layout on ``nodes`` with at most ``most`` ranks (default: all of them). Raises NoLayout."""
    nodes = [nodes] if isinstance(nodes, int) else list(nodes)
    most = min(sum(nodes), sum(nodes) if most is None else most)
    search = _Search(job, max(nodes, default=1))
    found = search.best(nodes, most)
    if not found:
        raise NoLayout(_nothing_fits(job, search, nodes, most))
    layout = found[0]
    reasons = _reasons(job, search, found, nodes, most)
    seconds = search.time(layout).total
    return LayoutChoice(layout, layout.world_size, sum(nodes) - layout.world_size, reasons, seconds)


def step_seconds(job: Job, layout: Layout) -> float:
    """The estimate that layouts are chosen by, on one node of any size."""
    return step_time(job, layout, host_of(job.hosts.device)).total


def choose_for_all(job: Job, hosts: int) -> LayoutChoice:
    """The cheapest valid layout of exactly ``hosts`` ranks on one node: none may be idle. Raises NoLayout."""
    search = _Search(job, hosts)
    valid = [layout for layout in layouts_of(job.parallel, hosts) if not _problems(job, layout)]
    if not valid:
        raise NoLayout(f"no layout of this job uses all of {_hosts(hosts)}")
    best = min(valid, key=lambda layout: _preference(job.parallel, layout, search.time(layout)))
    return LayoutChoice(best, hosts, 0, [], search.time(best).total)


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


class _Search:
    """All layouts of one job, the fastest first. ``largest_node``: hosts on the fullest of the nodes."""

    def __init__(self, job: Job, largest_node: int) -> None:
        self._job, self._host = job, host_of(job.hosts.device, largest_node)
        self._floor = Floor(Space(job, frozenset(), self._host.per_node), self._host)
        self._times: dict[Layout, StepTime] = {}
        self.looked_at = 0
        """layouts of which the constraints were checked"""

    def time(self, layout: Layout) -> StepTime:
        """Of a step in ``layout``, which may violate constraints as long as there is a layer for every stage."""
        if layout not in self._times:
            self._times[layout] = step_time(self._job, layout, self._host)
        return self._times[layout]

    def best(self, nodes: Sequence[int], most: int) -> list[Layout]:
        """The best layout and the second best, as far as there are any.

        What is computed and exchanged in passes never gets less with fewer data ranks. So a combination of the other
        axes is no faster than that with its largest number of data ranks, and those that cannot be among the best two
        are not looked at.
        """
        found: list[tuple[tuple[float, ...], Layout]] = []
        limit = math.inf
        for bound, base, copies in sorted(self._bases(nodes, most), key=lambda entry: entry[0]):
            if bound > limit:
                break
            for layout in self._with_data_ranks(base, copies):
                if self._at_least(layout) > limit:
                    break
                found.append((_preference(self._job.parallel, layout, self.time(layout)), layout))
                found = sorted(found)[:2]
                limit = found[1][0][0] if len(found) == 2 else math.inf
        return [layout for _, layout in found]

    def _at_least(self, layout: Layout) -> float:
        """Seconds that a step takes at least."""
        return round(self._floor.of(Mesh(layout.tp, layout.pp, layout.cp, layout.data_ranks)), _DIGITS)

    def least_memory(self, nodes: Sequence[int], most: int) -> Layout | None:
        """Of the layouts that would be valid without a limit of memory one that needs least."""
        ends = {end for _, base, copies in self._bases(nodes, most) for end in (base, self._widest(base, copies))}
        valid = [layout for layout in ends if not check_layout(self._job, layout)]
        return min(valid, key=lambda layout: (memory_bytes(self._job, layout), layout.world_size), default=None)

    def _bases(self, nodes: Sequence[int], most: int) -> Iterator[tuple[float, Layout, int]]:
        """(lower bound of the seconds, fixed data ranks with sizes of the other axes, how often that has room)."""
        fixed = smallest_layout(self._job.parallel)
        for tp in self._sizes("tp", max(nodes, default=0)):
            room = min(sum(hosts // tp * tp for hosts in nodes), most)
            for cp in self._sizes("cp", room // tp):
                for pp in self._sizes("pp", room // (tp * cp)):
                    base = replace(fixed, tp=tp, cp=cp, pp=pp)
                    if copies := room // base.world_size:
                        yield self._at_least(self._widest(base, copies)), base, copies

    def _free(self) -> list[str]:
        return [axis for axis in ("dp_replicate", "dp_shard") if getattr(self._job.parallel, axis) == "auto"]

    def _widest(self, base: Layout, copies: int) -> Layout:
        """``base`` with as many data ranks as there are slots and room for, sharded as far as can be."""
        free = self._free()
        if not free:
            return base
        return replace(base, **{free[-1]: max(1, min(copies, self._job.training.slots // base.data_ranks))})

    def _with_data_ranks(self, base: Layout, copies: int) -> Iterator[Layout]:
        """Valid layouts, each with the fewest data ranks for its number of micro-batches, the most first."""
        slots, ranks, limit = self._job.training.slots, base.data_ranks, self._job.hosts.memory_bytes
        widest = self._widest(base, copies)
        # Fewer data ranks need no less, but for one alone: it gathers nothing.
        if limit is not None and min(memory_bytes(self._job, layout) for layout in (widest, base)) > limit:
            return
        for first, last in equal_spans(slots, widest.data_ranks, ranks):
            fewest, most = first // ranks, last // ranks
            layout = self._split(base, fewest)
            if layout is None and fewest < most:
                # More of them may be needed for want of memory; it gets less with each.
                others = range(fewest + 1, most)
                wanted = bisect.bisect_left(others, True, key=lambda factor: self._split(base, factor) is not None)
                layout = self._split(base, fewest + 1 + wanted)
            if layout is not None:
                yield layout

    def _split(self, base: Layout, factor: int) -> Layout | None:
        """The preferred valid layout with ``factor`` times the data ranks of ``base``."""
        free = self._free()
        layouts = [replace(base, **dict(zip(free, sizes, strict=True))) for sizes in _factorizations(factor, len(free))]
        for layout in sorted(layouts, key=lambda layout: _preference(self._job.parallel, layout)):
            self.looked_at += 1
            if not _problems(self._job, layout):
                return layout
        return None

    def _sizes(self, axis: str, most: int) -> list[int]:
        """Sizes of an axis worth trying, up to ``most``."""
        size, model = getattr(self._job.parallel, axis), self._job.model
        if size != "auto":
            return [size] if size <= most else []
        if axis == "pp":
            deepest = model.num_hidden_layers // self._job.parallel.stages_per_rank
            return list(range(1, min(most, max(1, deepest)) + 1))
        if self._job.training.determinism == "exact":
            return [1]  # another size would give other bits
        whole = model.num_key_value_heads if axis == "tp" else self._job.data.sequence_length
        return [divisor for divisor in _divisors(whole) if divisor <= most]

    def would_do(self, nodes: Sequence[int], most: int) -> int | None:
        """The smallest larger number of hosts, up to ``hosts.max``, with a layout if the further ones share a node."""
        here, last = sum(nodes), self._job.hosts.max

        def fits(count: int) -> bool:
            more = [*nodes, count - here] if count > here else nodes
            return bool(self.best(more, count))

        low, high = most + 1, last
        if low > high or not fits(high):
            return None
        while low < high:  # what fits on some hosts fits on more
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low


def _preference(parallel: ParallelConfig, layout: Layout, time: StepTime | None = None) -> tuple[float, ...]:
    """Smallest first; without ``time`` among layouts of equal times."""
    one_sided = parallel.data == "hsdp" and 1 in (layout.dp_replicate, layout.dp_shard)
    order = (layout.world_size, layout.tp, layout.pp, layout.cp, one_sided, layout.dp_replicate, layout.dp_shard)
    return (round(time.total, _DIGITS) if time else 0.0, *order)


def _problems(job: Job, layout: Layout) -> list[str]:
    problems, limit = check_layout(job, layout), job.hosts.memory_bytes
    if not problems and limit is not None and (needed := memory_bytes(job, layout)) > limit:
        problems.append(f"layout {layout} needs {needed / 2**20:,.1f} MiB a host; hosts.memory={job.hosts.memory}")
    return problems


def _nothing_fits(job: Job, search: _Search, nodes: Sequence[int], most: int) -> str:
    smallest = smallest_layout(job.parallel)
    problems = check_layout(job, smallest)
    if problems:
        return f"no number of hosts can run layout {smallest}: {'; '.join(problems)}"
    spread = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    if smallest.world_size > most:
        fixed = " x ".join(f"parallel.{axis}={size}" for axis, size in _fixed(job.parallel).items() if size > 1)
        text = f"{_hosts(most)}{spread} cannot hold {fixed}: at least {_hosts(smallest.world_size)} are needed"
    elif smallest.tp > max(nodes, default=0):
        text = f"parallel.tp={smallest.tp} needs as many hosts on one node; the fullest of the nodes has {max(nodes)}"
    else:
        text = f"{_hosts(most)}{spread} cannot run this job"
        if (least := search.least_memory(nodes, most)) is not None:
            text += f": {'; '.join(_problems(job, least))}"
    would = search.would_do(nodes, most)
    return f"{text}; {f'{_hosts(would)} would do' if would else f'none up to hosts.max={job.hosts.max} would do'}"


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


def _reasons(job: Job, search: _Search, found: list[Layout], nodes: Sequence[int], most: int) -> list[str]:
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


def _why_spares(job: Job, search: _Search, layout: Layout, most: int) -> str:
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
