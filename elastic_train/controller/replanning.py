"""The layout for the hosts that are there, asked of the planner once per set of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from elastic_train.config.job import Job
from elastic_train.controller.host_record import HostRecord
from elastic_train.planner.layouts import LayoutChoice, NoLayout, choose_layout


class Replanning:
    """Of one job. ``problem`` says why the last answer was None."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[tuple[int, ...], LayoutChoice | str] = {}
        self.problem = ""

    def choose(self, hosts: Iterable[HostRecord], full: Iterable[HostRecord] = ()) -> LayoutChoice | None:
        """The best layout on ``hosts``; None: the job must wait. ``full``: hosts that have no room for snapshots."""
        nodes = tuple(sorted(Counter(host.node for host in hosts).values(), reverse=True))
        limits = self._job.hosts
        if sum(nodes) < limits.min:
            left_out = "".join(f"; {host.label} has no room: {host.left_out}" for host in full)
            self.problem = f"{sum(nodes)} hosts are ready; hosts.min={limits.min}{left_out}"
            return None
        if nodes not in self._known:
            try:
                self._known[nodes] = choose_layout(self._job, nodes, limits.max)
            except NoLayout as error:
                self._known[nodes] = str(error)
        answer = self._known[nodes]
        if isinstance(answer, str):
            self.problem = answer
            return None
        return answer
