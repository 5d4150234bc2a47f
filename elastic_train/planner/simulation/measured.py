"""What a real run's logs say of its failures and what they cost: the scenario that should give its goodput again."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_train.config.faults import Fault, Kind
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.costs import MEASURED, Costs, Pace, Pause, Saves
from elastic_train.planner.simulation.failures import Failures, traced
from elastic_train.planner.simulation.scenario import Growth, Scenario
from elastic_train.planner.simulation.throughput import Hosts, Share, Throughput

Line = Mapping[str, Any]
_KINDS = {
    "trainer_killed": Kind.KILL_TRAINER,
    "trainer_crashed": Kind.KILL_TRAINER,
    "out_of_memory": Kind.KILL_TRAINER,
    "exception": Kind.KILL_TRAINER,
    "bad_step": Kind.KILL_TRAINER,
    "peer": Kind.KILL_TRAINER,
    "host_lost": Kind.KILL_HOST,
    "host_silent": Kind.PARTITION,
    "hang": Kind.HANG,
    "preemption": Kind.DRAIN,
}
"""Causes of a generation in the ledger that are failures. A loss of all hosts of a node counts as that of the node."""
_BESIDE = (Cause.DATA_WAIT, Cause.CHECKPOINT_STALL, Cause.EVALUATION)
_PARTS = ("detection", "teardown", "form", "restore", "first_step")
_ECHO_SECONDS = 1.0
"""a generation that fails so soon after the last chaos fails because of it, beyond its own recovery"""


class NothingMeasured(ValueError):
    """The logs do not tell enough; the sentence says what is missing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Times in seconds; 0 is when its hosts had come.

    Attributes:
        faults: what happened when. Whom it hit is left to chance.
        used: hosts that were there -> how many of them took part, and how fast that was (1: the fastest).
        goodput: as the ledger has it; ``seconds``: of hosts, by cause.
    """

    nodes: int
    hosts_per_node: int
    duration: float
    start: float
    finish: float
    step: float
    save_every: float
    beside: Mapping[Cause, float]
    pauses: Mapping[Kind, Pause]
    growth: Pause
    newcomer: float
    host_return: float
    replace: float
    faults: tuple[Fault, ...]
    used: Mapping[int, tuple[int, float]]
    goodput: float
    seconds: Mapping[str, float] = field(default_factory=dict)

    def scenario(self) -> Scenario:
        """The same cluster and job under the same faults."""
        return Scenario(
            nodes=self.nodes,
            hosts_per_node=self.hosts_per_node,
            throughput=as_seen(self.used),
            failures=Failures(trace=traced(self.faults)),
            duration=self.duration,
            costs=Costs({**MEASURED, **self.pauses}, growth=self.growth, per_host=0.0),
            saves=Saves(every=self.save_every, seconds=self.step),
            pace=Pace(self.step, self.beside),
            growth=Growth(margin=0.0),
            replace=self.replace,
            host_return=self.host_return,
            newcomer=self.newcomer,
            start=self.start,
            finish=self.finish,
        )


def as_seen(used: Mapping[int, tuple[int, float]]) -> Throughput:
    """Hosts used and speed as they were with as many hosts, or with the next smaller number that was seen."""

    def share(hosts: Hosts) -> Share | None:
        there = sum(each * count for each, count in hosts.items())
        below = [count for count in used if count <= there]
        return Share(*used[max(below)]) if below else None

    return share


def measured(ledger: Sequence[Line], steps: Sequence[Line], seed: int = 1) -> Measured:
    """Of the last run in ``ledger.jsonl`` and ``steps.jsonl``. Raises NothingMeasured."""
    begin = max((at for at, line in enumerate(ledger) if line["event"] == "job_started"), default=None)
    if begin is None:
        raise NothingMeasured("the ledger has no job_started: nothing has run")
    run = _Run(ledger[begin:], steps)
    if not run.has_hosts:
        raise NothingMeasured(
            "the ledger's last run has no host_joined before its first generation: who ran is unknown"
        )
    accounts = run.of("time_account")
    if not run.formed or not accounts or not run.step_seconds:
        raise NothingMeasured("the ledger's last run has finished no step; simulate needs a run that has trained")
    return run.measured(accounts[-1], seed)


class _Run:
    """The lines of one run, sorted by what they tell."""

    def __init__(self, ledger: Sequence[Line], steps: Sequence[Line]) -> None:
        self._ledger = ledger
        self.formed = self.of("generation_formed")
        begin = ledger[0]["time"]
        steps = [line for line in steps if line["time"] >= begin and line.get("seconds")]
        by_layout: dict[str, list[float]] = defaultdict(list)
        for line in steps:
            by_layout[line["layout"]].append(line["seconds"])
        self.step_seconds = {layout: statistics.median(seconds) for layout, seconds in by_layout.items()}
        first = self.formed[0]["time"] if self.formed else begin
        self._joined = [line for line in self.of("host_joined") if line["time"] <= first]
        self._later = [line for line in self.of("host_joined") if line["time"] > first]
        self._zero = statistics.fmean(line["time"] for line in self._joined) if self._joined else begin

    @property
    def has_hosts(self) -> bool:
        return bool(self._joined)

    def of(self, event: str) -> list[Line]:
        return [line for line in self._ledger if line["event"] == event]

    def measured(self, account: Line, seed: int) -> Measured:
        step, seconds = min(self.step_seconds.values()), account["seconds"]
        nodes = Counter(line["node"] for line in self._joined)
        finish = seconds.get(Cause.FINISHING, 0.0) / max(account["hosts"], 1)
        start = self.formed[0]["time"] - self._zero
        pauses, growth = self._pauses()
        working = sum(seconds.get(cause, 0.0) for cause in (Cause.USEFUL, Cause.REPLAYED, *_BESIDE))
        replace = self._until_joined(same_node=False)
        late = seconds.get(Cause.START, 0.0) - start * len(self._joined)
        return Measured(
            nodes=len(nodes),
            hosts_per_node=max(nodes.values()),
            duration=account["time"] - self._zero - finish,
            start=start,
            finish=finish,
            step=step,
            save_every=self._save_every() * step,
            beside={cause: seconds[cause] / working for cause in _BESIDE if seconds.get(cause)},
            pauses=pauses,
            growth=growth,
            newcomer=max(late, 0.0) / len(self._later) if self._later else 0.0,
            host_return=min(self._until_joined(same_node=True), replace),
            replace=replace,
            faults=tuple(self._faults(seed)),
            used=self._used(step),
            goodput=account["goodput"],
            seconds=seconds,
        )

    def _save_every(self) -> int:
        """Steps between two checkpoints, as most of them were."""
        saved = sorted({line["step"] for line in self.of("checkpoint_committed")})
        gaps = [after - before for before, after in itertools.pairwise(saved)]
        return int(statistics.median(gaps)) if gaps else max(saved, default=10_000)

    def _used(self, step: float) -> dict[int, tuple[int, float]]:
        return {
            line["hosts"] + line["spares"]: (line["hosts"], step / self.step_seconds[line["layout"]])
            for line in self.formed
            if line["layout"] in self.step_seconds
        }

    def _pauses(self) -> tuple[dict[Kind, Pause], Pause]:
        """Means by kind of failure, and of taking hosts in."""
        parts: dict[Kind | None, list[Pause]] = defaultdict(list)
        for line in self.formed:
            kind = None if line["cause"] == "growth" else self._kind_of(line)
            if kind is None and line["cause"] != "growth":
                continue
            usual = self.step_seconds.get(line["layout"], 0.0)
            detection, teardown, form, restore, first = (line[f"{name}_seconds"] for name in _PARTS)
            parts[kind].append(Pause(detection, teardown, form, restore, max(first - usual, 0.0)))
        means = {kind: mean_pause(pauses) for kind, pauses in parts.items()}
        growth = means.pop(None, None) or means.get(Kind.DRAIN) or MEASURED[Kind.DRAIN]
        return {kind: pause for kind, pause in means.items() if kind is not None}, growth

    def _kind_of(self, formed: Line) -> Kind | None:
        """Of the failure before ``formed``: what chaos did at the time, or what its cause says."""
        if formed["cause"] not in _KINDS:
            return None
        since = formed["time"] - formed["recovery_seconds"] - _ECHO_SECONDS
        struck = [line for line in self.of("chaos") if since <= line["time"] <= formed["time"]]
        if struck:
            return Kind(struck[-1]["kind"])
        kind = _KINDS[formed["cause"]]
        if kind != Kind.KILL_HOST:
            return kind
        lost = Counter(line["node"] for line in self.of("host_lost") if since <= line["time"] <= formed["time"])
        return Kind.KILL_NODE if max(lost.values(), default=0) >= self._on_a_node() else kind

    def _on_a_node(self) -> int:
        return max(Counter(line["node"] for line in self._joined).values())

    def _faults(self, seed: int) -> Iterable[Fault]:
        """Chaos, and the failures that were nobody's doing."""
        chance, chaos = random.Random(seed), self.of("chaos")
        found = [(line["time"], Kind(line["kind"]), float(line.get("seconds") or 0.0)) for line in chaos]
        for line in self.formed:
            kind, happened = self._kind_of(line), line["time"] - line["recovery_seconds"]
            caused = any(happened - _ECHO_SECONDS <= each["time"] <= line["time"] for each in chaos)
            if kind is not None and not caused:
                found.append((happened, kind, 0.0))
        return [Fault(at - self._zero, kind, chance.random(), seconds) for at, kind, seconds in sorted(found)]

    def _until_joined(self, *, same_node: bool) -> float:
        """Mean seconds from a host's end to the next one's arrival on the same node, or on another; inf: none came."""
        waits = []
        for lost in [*self.of("host_lost"), *self.of("host_left")]:
            after = [
                line["time"] - lost["time"]
                for line in self._later
                if line["time"] > lost["time"] and (line["node"] == lost["node"]) == same_node
            ]
            waits += after[:1]
        return statistics.fmean(waits) if waits else math.inf


def mean_pause(pauses: Sequence[Pause]) -> Pause:
    """Part by part."""
    columns = zip(*([seconds for _, seconds in pause.parts()] for pause in pauses), strict=True)
    return Pause(*(statistics.fmean(column) for column in columns))
