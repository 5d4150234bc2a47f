"""All layouts of a job on the hosts that are there, the fastest first."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.parallel import ParallelConfig
from elastic_train.planner.axis_sizes import divisors, factorizations, smallest_layout
from elastic_train.planner.constraints import check_layout
from elastic_train.planner.data_ranks import equal_spans
from elastic_train.planner.hardware_table import host_of
from elastic_train.planner.host_memory import host_problem
from elastic_train.planner.machines import Machine
from elastic_train.planner.memory import memory_bytes
from elastic_train.planner.search_bound import Floor
from elastic_train.planner.search_options import Mesh
from elastic_train.planner.search_space import Space
from elastic_train.planner.step_time import StepTime, step_time

_DIGITS = 9
"""of seconds: below that they are equal"""


class LayoutSearch:
    """All layouts of one job, the fastest first. ``largest_node``: hosts on the fullest of the nodes."""

    def __init__(self, job: Job, largest_node: int, machine: Machine | None = None) -> None:
        """``machine``: what the hosts are; None: not known, then only ``hosts.memory`` limits what they hold."""
        self._job, self._machine = job, machine
        self.accelerator = host_of(job.hosts.device, largest_node) if machine is None else machine.accelerator
        own = None if machine is None else machine.memory_bytes
        self._limit = own if job.hosts.memory is None else job.hosts.memory_bytes
        self._floor = Floor(Space(job, frozenset(), self.accelerator.per_node), self.accelerator)
        self._times: dict[Layout, StepTime] = {}
        self.looked_at = 0
        """valid layouts that could have been chosen"""

    def time(self, layout: Layout) -> StepTime:
        """Of a step in ``layout``, which may violate constraints as long as there is a layer for every stage."""
        if layout not in self._times:
            self._times[layout] = step_time(self._job, layout, self.accelerator)
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
                found.append((preference(self._job.parallel, layout, self.time(layout)), layout))
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
        slots, ranks, limit = self._job.training.slots, base.data_ranks, self._limit
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
        """A valid layout with ``factor`` times the data ranks of ``base``.

        With ``hsdp`` the fastest of those that both replicate and shard. Where there is none, and with other
        strategies, that with most shards, which needs least memory.
        """
        free = self._free()
        sizes = factorizations(factor, len(free))
        layouts = [replace(base, **dict(zip(free, each, strict=True))) for each in sizes]
        layouts = [layout for layout in layouts if not check_layout(self._job, layout)]
        self.looked_at += len(layouts)
        layouts.sort(key=self._split_preference)
        return next((layout for layout in layouts if self.too_large(layout) is None), None)

    def _split_preference(self, layout: Layout) -> tuple[float, ...]:
        if self._job.parallel.data != "hsdp" or _one_sided(layout):
            return math.inf, layout.dp_replicate
        return preference(self._job.parallel, layout, self.time(layout))

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
        return [divisor for divisor in divisors(whole) if divisor <= most]

    def too_large(self, layout: Layout) -> str | None:
        """That a host, or a node, has not the memory that a valid layout needs; None if it has."""
        if self._limit is not None and (needed := memory_bytes(self._job, layout)) > self._limit:
            stated = self._job.hosts.memory
            have = f"they have {self._limit / 2**20:,.1f} MiB" if stated is None else f"hosts.memory={stated}"
            return f"layout {layout} needs {needed / 2**20:,.1f} MiB a host; {have}"
        return None if self._machine is None else host_problem(self._job, layout, self.accelerator)

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


def preference(parallel: ParallelConfig, layout: Layout, time: StepTime) -> tuple[float, ...]:
    """Smallest first."""
    sizes = layout.world_size, layout.tp, layout.pp, layout.cp
    # hsdp is meant to do both.
    split = parallel.data == "hsdp" and _one_sided(layout), layout.dp_replicate, layout.dp_shard
    return round(time.total, _DIGITS), *sizes, *split


def _one_sided(layout: Layout) -> bool:
    """Whether data ranks only replicate, or only shard."""
    return 1 in (layout.dp_replicate, layout.dp_shard)
