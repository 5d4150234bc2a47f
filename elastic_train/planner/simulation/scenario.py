"""The question put to the simulator, and the answer of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.costs import Costs, Pace, Saves, Tiers, elastic
from elastic_train.planner.simulation.failures import Failures
from elastic_train.planner.simulation.repair import Repair
from elastic_train.planner.simulation.throughput import Throughput


@dataclass(frozen=True, slots=True)
class Growth:
    """As ``hosts.growth_*`` of a job file: when hosts that came are worth a pause."""

    horizon: float = 300.0
    margin: float = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, a job and what may happen to them. Times in seconds.

    Attributes:
        nodes: of the full job; ``spares`` more are there and stand by.
        repair: until a lost node is replaced, from its failure or notice on; not before the notice of a drain ends.
        host_return: until a killed host is there again.
        newcomer: from a host's arrival until it can compute.
        start: of the run, in which all hosts start; ``finish``: from the last step to the end, beyond ``duration``.
    """

    nodes: int
    hosts_per_node: int
    throughput: Throughput
    failures: Failures
    duration: float
    spares: int = 0
    costs: Costs = field(default_factory=elastic)
    saves: Saves = field(default_factory=Saves)
    tiers: Tiers = field(default_factory=Tiers)
    pace: Pace = field(default_factory=Pace)
    growth: Growth = field(default_factory=Growth)
    repair: Repair = field(default_factory=lambda: Repair(3600.0))
    host_return: float = 10.0
    newcomer: float = 60.0
    start: float = 0.0
    finish: float = 0.0

    @property
    def places(self) -> int:
        return self.nodes + self.spares

    @property
    def save_steps(self) -> int:
        """Steps between two saves."""
        return max(1, round(self.saves.every / self.pace.step))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run.

    Attributes:
        goodput: useful host-seconds over all seconds of hosts that were there, as in the ledger.
        ettr: effective training time ratio: time in which steps were computed that had not been finished before, over
            elapsed time (arXiv:2410.21680); spares and slower steps on fewer hosts do not count against it.
        progress: finished steps over those of the full job without any failure.
        running: seconds in which the job worked or was held up by a save; ``waiting``: the share of the elapsed time in
            which it waited for hosts.
        host_seconds: of hosts that were there: what is paid for.
        interruptions: failures that paused the job; ``from_storage``: those that took the state in memory with them.
        steps_lost: finished steps that had to be repeated, in all.
        events: that the simulator has processed.
        moments: (time, seconds by cause since the start).
    """

    seconds: Mapping[Cause, float]
    ettr: float
    progress: float
    running: float
    waiting: float
    steps: int
    failures: int
    interruptions: int
    from_storage: int
    steps_lost: int
    events: int
    moments: list[tuple[float, dict[Cause, float]]]

    @property
    def host_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        return self.seconds.get(Cause.USEFUL, 0.0) / self.host_seconds if self.host_seconds else 0.0
