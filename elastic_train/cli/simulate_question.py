"""From options, a job file or a run's logs to the scenarios that ``elastic-train simulate`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_train.cli.guard import UserError
from elastic_train.config.faults import LLAMA3_FAILURES, LLAMA3_SECONDS, TraceError, read_trace
from elastic_train.config.job import Job
from elastic_train.planner.simulation.confidence import Runs
from elastic_train.planner.simulation.costs import HANG_SECONDS, LEASE_SECONDS, Pace, Saves, Tiers, elastic, restarts
from elastic_train.planner.simulation.events import simulate
from elastic_train.planner.simulation.failures import (
    Distribution,
    Failures,
    UnknownFailures,
    distribution,
    rate,
    traced,
)
from elastic_train.planner.simulation.measured import Measured, NothingMeasured, measured
from elastic_train.planner.simulation.scenario import Growth, Outcome, Scenario
from elastic_train.planner.simulation.throughput import Throughput, planned, proportional

LLAMA3_NODES, LLAMA3_SPARES = 2048, 16
"""16,384 GPUs; the cluster had 24,000 (arXiv:2407.21783, section 3.3), so spares were never short."""
LLAMA3_MTBF = LLAMA3_SECONDS * LLAMA3_NODES / sum(cause.count for cause in LLAMA3_FAILURES.values())
"""Of one node, seconds."""
_LEAST = {"nodes": 1, "gpus_per_node": 1, "spares": 0, "unit_nodes": 1, "min_nodes": 1, "runs": 1, "rack_nodes": 0}
_LEAST |= {"partners": 0, "checkpoint_stall": 0}
RECOVERIES = ("elastic", "restart", "both")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options; None: not given. Times in seconds unless the name says otherwise."""

    job: str | None = None
    like: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    mtbf_hours: float | None = None
    days: float | None = None
    spares: int | None = None
    unit_nodes: int = 1
    min_nodes: int = 1
    step: float = 10.0
    checkpoint_every: float | None = None
    checkpoint_takes: float = 60.0
    checkpoint_stall: float | None = None
    partners: int | None = None
    failures: str = "exponential"
    rack_nodes: int = 0
    rack_mtbf_hours: float | None = None
    spot: str | None = None
    notice: float = 120.0
    replace: float = 3600.0
    recovery: str | None = None
    pause: float | None = None
    seed: int = 1
    runs: int = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the answer; ``outcomes(history)`` runs it."""

    name: str
    scenario: Scenario
    outcomes: Callable[[bool], list[Outcome]]


@dataclass(frozen=True, slots=True)
class Question:
    """``measured``: what is known of the real run that is simulated."""

    title: str
    cases: list[Case]
    measured: Measured | None = None


def asked_of(asked: Asked) -> Question:
    """The scenarios of options and a job file. Raises UserError, ConfigError."""
    if asked.like not in (None, "llama3"):
        raise UserError(f"--like={asked.like}: must be llama3 (arXiv:2407.21783)")
    if asked.like:
        known = Asked(nodes=LLAMA3_NODES, gpus_per_node=8, days=54.0, spares=LLAMA3_SPARES, unit_nodes=16)
        asked = replace(_filled(asked, known), recovery=asked.recovery or "both")
    job = _job(asked.job)
    if job is not None:
        each = asked.gpus_per_node or min(8, job.hosts.max)
        asked = _filled(asked, Asked(nodes=-(-job.hosts.max // each), gpus_per_node=each))
    asked = _filled(asked, Asked(gpus_per_node=8, spares=0))
    _check(asked)
    failures = _failures(asked)
    scenarios = _scenarios(asked, job, failures, _duration(asked, failures))
    count = 1 if failures.trace is not None else asked.runs
    cases = [_case(name, scenario, asked.seed, count) for name, scenario in scenarios.items()]
    first = cases[0].scenario
    title = (
        f"{first.nodes:,} nodes x {first.hosts_per_node} GPUs, {first.spares} spare, "
        f"{_length(first.duration)}; {_told(asked, failures)}; "
        f"{count} run{'s' if count > 1 else ''} from seed {asked.seed}"
    )
    return Question(title, cases)


def question_of_run(
    name: str, ledger: list[dict[str, object]], steps: list[dict[str, object]], asked: Asked
) -> Question:
    """A real run, again: its faults at their times, each run with other victims. Raises UserError."""
    try:
        seen = measured(ledger, steps, asked.seed)
    except NothingMeasured as error:
        raise UserError(f"{name}: {error}") from None

    def outcomes(history: bool) -> list[Outcome]:
        seeds = range(asked.seed, asked.seed + asked.runs)
        again = [measured(ledger, steps, seed).scenario() for seed in seeds]
        return [simulate(each, history=history and not number) for number, each in enumerate(again)]

    title = f"{name}: {seen.duration:.0f} s on {seen.nodes} nodes x {seen.hosts_per_node}, {len(seen.faults)} failures"
    return Question(title, [Case("simulated", seen.scenario(), outcomes)], seen)


def _job(path: str | None) -> Job | None:
    if path is None:
        return None
    from elastic_train.planner.admission import admit_job

    return admit_job(path)


def _filled(asked: Asked, known: Asked) -> Asked:
    """``asked`` with what ``known`` says where nothing was given."""
    names = ("nodes", "gpus_per_node", "days", "spares")
    given = {name: getattr(asked, name) for name in names}
    fill = {name: getattr(known, name) for name, value in given.items() if value is None}
    if known.unit_nodes != 1 and asked.unit_nodes == 1:
        fill["unit_nodes"] = known.unit_nodes
    return replace(asked, **fill)


def _check(asked: Asked) -> None:
    if asked.nodes is None:
        raise UserError("give a cluster: --nodes, a job file, --like llama3, or --from JOB for a run of yours")
    for name, bound in _LEAST.items():
        value = getattr(asked, name)
        if value is not None and not value >= bound:
            raise UserError(f"{_option(name)}={value}: must be at least {bound}")
    for name in ("mtbf_hours", "rack_mtbf_hours", "days"):
        value = getattr(asked, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{_option(name)}={value:g}: must be a number above 0")
    for name in ("unit_nodes", "min_nodes"):
        if asked.job is not None and getattr(asked, name) != 1:
            raise UserError(f"{_option(name)}: {asked.job} says that itself, by parallel and hosts.min")
        if getattr(asked, name) > asked.nodes:
            raise UserError(f"{_option(name)}={getattr(asked, name)}: must be at most --nodes={asked.nodes}")
    if asked.recovery not in (None, *RECOVERIES):
        raise UserError(f"--recovery={asked.recovery}: must be one of {', '.join(RECOVERIES)}")
    if bool(asked.rack_nodes) != (asked.rack_mtbf_hours is not None):
        raise UserError("--rack-nodes and --rack-mtbf-hours belong together: how many nodes fail at once, how often")
    every, takes = asked.checkpoint_every, asked.checkpoint_takes
    if every is not None and every < takes:
        raise UserError(f"--checkpoint-every={every:g}s: must be at least --checkpoint-takes={takes:g}s")
    if (asked.checkpoint_stall or 0.0) > takes:
        raise UserError(
            f"--checkpoint-stall={asked.checkpoint_stall:g}s: must be at most --checkpoint-takes={takes:g}s"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _failures(asked: Asked) -> Failures:
    try:
        if Path(asked.failures).suffix in (".jsonl", ".json", ".txt") or Path(asked.failures).is_file():
            return Failures(trace=traced(read_trace(Path(asked.failures), asked.seed, asked.notice)))
        shape: Distribution = distribution(asked.failures)
        return Failures(
            mtbf=LLAMA3_MTBF if asked.mtbf_hours is None else 3600 * asked.mtbf_hours,
            distribution=shape,
            rack_nodes=asked.rack_nodes,
            rack_mtbf=3600 * asked.rack_mtbf_hours if asked.rack_mtbf_hours else float("inf"),
            spot=rate(asked.spot) if asked.spot else 0.0,
            notice=asked.notice,
        )
    except (UnknownFailures, TraceError) as error:
        raise UserError(f"--{error}" if isinstance(error, UnknownFailures) else str(error)) from None


def _duration(asked: Asked, failures: Failures) -> float:
    """Of a trace without --days: until one mean gap after its last fault."""
    if asked.days is None and failures.trace:
        return max(failures.trace[-1].at, 1.0) * (len(failures.trace) + 1) / len(failures.trace)
    return 86400 * (30.0 if asked.days is None else asked.days)


def _scenarios(asked: Asked, job: Job | None, failures: Failures, duration: float) -> dict[str, Scenario]:
    wanted = RECOVERIES[:2] if asked.recovery == "both" else (asked.recovery or "elastic",)
    return {name: _scenario(name, asked, job, failures, duration) for name in wanted}


def _scenario(name: str, asked: Asked, job: Job | None, failures: Failures, duration: float) -> Scenario:
    assert asked.nodes is not None and asked.gpus_per_node is not None and asked.spares is not None
    nodes, each, restart = asked.nodes, asked.gpus_per_node, name == "restart"
    failure = job.failure if job else None
    if restart:
        costs = restarts()
    else:
        costs = elastic(*((failure.hang_seconds, failure.lease_seconds) if failure else (HANG_SECONDS, LEASE_SECONDS)))
    if asked.pause is not None:
        pauses = {kind: pause.scaled(asked.pause) for kind, pause in costs.pauses.items()}
        costs = replace(costs, pauses=pauses, growth=costs.growth.scaled(asked.pause), per_host=0.0, load=0.0)
    partners = asked.partners if asked.partners is not None else job.snapshot.partners if job else 1
    return Scenario(
        nodes=nodes,
        hosts_per_node=each,
        spares=asked.spares,
        throughput=_throughput(asked, job, restart),
        failures=failures,
        duration=duration,
        costs=costs,
        saves=_saves(asked, job, restart),
        tiers=Tiers(memory=not restart, partners=partners),
        pace=Pace(asked.step),
        growth=Growth(job.hosts.growth_horizon_seconds, job.hosts.growth_margin) if job else Growth(),
        replace=asked.replace,
    )


def _throughput(asked: Asked, job: Job | None, restart: bool) -> Throughput:
    assert asked.nodes is not None and asked.gpus_per_node is not None
    each = asked.gpus_per_node
    full = asked.nodes * each
    if restart:  # the same size again, or none
        return proportional(full, full)
    if job is not None:
        from elastic_train.planner.layouts import NoLayout

        try:
            return planned(job, {each: asked.nodes})
        except NoLayout as error:
            raise UserError(f"{asked.job}: {error}") from None
    return proportional(full, asked.min_nodes * each, asked.unit_nodes * each)


def _saves(asked: Asked, job: Job | None, restart: bool) -> Saves:
    every = asked.checkpoint_every
    if every is None:
        every = job.checkpoint.every_steps * asked.step if job else 300.0 if restart else 600.0
    stall = asked.checkpoint_stall
    if stall is None:
        stall = 5.0 if restart else 0.0
    return Saves(every, min(stall, asked.checkpoint_takes), min(asked.checkpoint_takes, every))


def _case(name: str, scenario: Scenario, seed: int, count: int) -> Case:
    return Case(name, scenario, lambda history: Runs(scenario, seed, count).outcomes(history=history))


def _length(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds:.4g} seconds"


def _told(asked: Asked, failures: Failures) -> str:
    """The failures in words."""
    if failures.trace is not None:
        return f"{len(failures.trace)} failures of {asked.failures}"
    told = [f"a node fails once in {failures.mtbf / 3600:,.0f} hours ({asked.failures})"]
    if asked.rack_nodes:
        told.append(f"{asked.rack_nodes} nodes at once in {asked.rack_mtbf_hours:,.0f} hours")
    if asked.spot:
        told.append(f"reclaimed {asked.spot}")
    return ", ".join(told)
