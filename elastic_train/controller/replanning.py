"""The layout for the hosts that are there, asked of the planner once per set of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from elastic_train.config.job import Job
from elastic_train.controller.host_record import HostRecord
from elastic_train.planner.layouts import LayoutChoice, NoLayout, choose_layout
from elastic_train.planner.machines import Machine, machine_of


class Replanning:
    """Of one job. ``problem`` says why the last answer was None."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[tuple[tuple[int, ...], Machine], LayoutChoice | str] = {}
        self.problem = ""

    def choose(self, hosts: Iterable[HostRecord], full: Iterable[HostRecord] = ()) -> LayoutChoice | None:
        """The best layout on ``hosts``; None: the job must wait. ``full``: hosts that have no room for snapshots."""
        hosts = list(hosts)
        nodes = tuple(sorted(Counter(host.node for host in hosts).values(), reverse=True))
        limits = self._job.hosts
        if sum(nodes) < limits.min:
            left_out = "".join(f"; {host.label} has no room: {host.left_out}" for host in full)
            self.problem = f"{sum(nodes)} hosts are ready; hosts.min={limits.min}{left_out}"
            return None
        asked = nodes, machine_of(self._job, (host.told for host in hosts), nodes[0])
        if asked not in self._known:
            try:
                self._known[asked] = choose_layout(self._job, nodes, limits.max, asked[1])
            except NoLayout as error:
                self._known[asked] = str(error)
        answer = self._known[asked]
        if isinstance(answer, str):
            self.problem = answer
            return None
        return answer
