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
from elastic_train.planner.simulation.repair import Repair
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
PARTS = ("detection", "teardown", "form", "restore", "first_step")
_NAME = 8
"""characters of a node's name in the ledger's sentences"""
_ECHO_SECONDS = 1.0
"""a generation that fails so soon after the last chaos fails because of it, beyond its own recovery"""


class NothingMeasured(ValueError):
    """The logs do not tell enough; the sentence says what is missing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Times in seconds; 0 is when its hosts had come.

    Attributes:
        faults: what happened when, and to which node; where the ledger does not say, chance picks it.
        places: of the nodes that it names: those of the start in their order, then each in the place of a lost one.
        save_every, save_seconds: between two checkpoints, and of one until it is committed.
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
    save_seconds: float
    beside: Mapping[Cause, float]
    pauses: Mapping[Kind, Pause]
    growth: Pause
    newcomer: float
    host_return: float
    replace: float
    faults: tuple[Fault, ...]
    places: Mapping[str, int]
    used: Mapping[int, tuple[int, float]]
    goodput: float
    seconds: Mapping[str, float] = field(default_factory=dict)

    def scenario(self) -> Scenario:
        """The same cluster and job under the same faults."""
        return Scenario(
            nodes=self.nodes,
            hosts_per_node=self.hosts_per_node,
            throughput=as_seen(self.used),
            failures=Failures(trace=traced(self.faults, self.places)),
            duration=self.duration,
            costs=Costs({**MEASURED, **self.pauses}, growth=self.growth, per_host=0.0),
            saves=Saves(every=self.save_every, seconds=self.save_seconds),
            pace=Pace(self.step, self.beside),
            growth=Growth(margin=0.0),
            repair=Repair(self.replace),
            host_return=self.host_return,
            newcomer=self.newcomer,
            start=self.start,
            finish=self.finish,
        )


def as_seen(used: Mapping[int, tuple[int, float]]) -> Throughput:
    """Hosts used and speed as they were with as many hosts, or with the next smaller number that was seen.

    More of them are taken in whenever they come, as the planner holds them for faster, whether they were or not.
    """
    most = max(used)

    def share(hosts: Hosts) -> Share | None:
        there = sum(each * count for each, count in hosts.items())
        below = [count for count in used if count <= there]
        if not below:
            return None
        taking_part, speed = used[max(below)]
        return Share(taking_part, speed, taking_part / most)

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
        replacements = self._replacements()
        replace = statistics.fmean(waits) if (waits := [wait for *_, wait in replacements]) else math.inf
        late = seconds.get(Cause.START, 0.0) - start * len(self._joined)
        return Measured(
            nodes=len(nodes),
            hosts_per_node=max(nodes.values()),
            duration=account["time"] - self._zero - finish,
            start=start,
            finish=finish,
            step=step,
            save_every=self._save_every() * step,
            save_seconds=self._save_seconds(step),
            beside={cause: seconds[cause] / working for cause in _BESIDE if seconds.get(cause)},
            pauses=pauses,
            growth=growth,
            newcomer=max(late, 0.0) / len(self._later) if self._later else 0.0,
            host_return=min(self._until_back(), replace),
            replace=replace,
            faults=tuple(self._faults(seed)),
            places=self._places(replacements),
            used=self._used(step),
            goodput=account["goodput"],
            seconds=seconds,
        )

    def _save_every(self) -> int:
        """Steps between two checkpoints, as most of them were."""
        saved = sorted({line["step"] for line in self.of("checkpoint_committed")})
        gaps = [after - before for before, after in itertools.pairwise(saved)]
        return int(statistics.median(gaps)) if gaps else max(saved, default=10_000)

    def _save_seconds(self, step: float) -> float:
        seconds = [line["seconds"] for line in self.of("checkpoint_committed") if line.get("seconds")]
        return statistics.median(seconds) if seconds else step

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
            detection, teardown, form, restore, first = (line[f"{name}_seconds"] for name in PARTS)
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
        found = [(line["time"], Kind(line["kind"]), float(line.get("seconds") or 0.0), _node(line)) for line in chaos]
        for line in self.formed:
            kind, happened = self._kind_of(line), line["time"] - line["recovery_seconds"]
            caused = any(happened - _ECHO_SECONDS <= each["time"] <= line["time"] for each in chaos)
            if kind is not None and not caused:
                found.append((happened, kind, 0.0, None))
        found.sort(key=lambda each: each[0])
        return [Fault(at - self._zero, kind, chance.random(), seconds, node) for at, kind, seconds, node in found]

    def _until_back(self) -> float:
        """Mean seconds from a host's end to the next one's arrival on the same node; inf: none came."""
        waits = []
        for lost in self._ends():
            after = [line["time"] for line in self._later if line["node"] == lost["node"]]
            waits += [time - lost["time"] for time in after if time > lost["time"]][:1]
        return statistics.fmean(waits) if waits else math.inf

    def _ends(self) -> list[Line]:
        """Of hosts."""
        return sorted([*self.of("host_lost"), *self.of("host_left")], key=lambda line: float(line["time"]))

    def _replacements(self) -> list[tuple[str, str, float]]:
        """(lost node, the one in its place, seconds until that came): first lost, first replaced.

        A node is asked for when another one gets notice, and otherwise when that is lost.
        """
        first = {line["node"]: line["time"] for line in reversed([*self._joined, *self._later])}
        new = sorted((time, node) for node, time in first.items() if time > self.formed[0]["time"])
        notice = {line["node"]: line["time"] for line in self.of("preemption_notice")}
        found = []
        for lost, time in sorted(self._lost_nodes().items(), key=lambda each: each[1]):
            since = notice.get(lost, time)
            if (next_one := next((each for each in new if each[0] > since), None)) is not None:
                new.remove(next_one)
                found.append((lost, next_one[1], next_one[0] - since))
        return found

    def _lost_nodes(self) -> dict[str, float]:
        """Node -> when its last host ended; on which none came since."""
        joined = {line["node"]: line["time"] for line in [*self._joined, *self._later]}
        hosts = Counter(line["node"] for line in [*self._joined, *self._later])
        hosts.subtract(Counter(line["node"] for line in self._ends()))
        ended = {line["node"]: line["time"] for line in self._ends()}
        return {node: time for node, time in ended.items() if hosts[node] <= 0 and time > joined.get(node, -math.inf)}

    def _places(self, replacements: Sequence[tuple[str, str, float]]) -> dict[str, int]:
        places = {node: place for place, node in enumerate(dict.fromkeys(line["node"] for line in self._joined))}
        for lost, node, _ in replacements:
            places[node] = places[lost]
        return {node[:_NAME]: place for node, place in places.items()}


def _node(chaos: Line) -> str | None:
    """The beginning of the name of the node that chaos struck."""
    words = str(chaos.get("victim", "")).split()
    return words[-1][:_NAME] if len(words) > 1 and words[-2] == "node" else None


def mean_pause(pauses: Sequence[Pause]) -> Pause:
    """Part by part."""
    columns = zip(*([seconds for _, seconds in pause.parts()] for pause in pauses), strict=True)
    return Pause(*(statistics.fmean(column) for column in columns))
