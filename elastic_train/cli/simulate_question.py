"""From options, a job file or a run's logs to the scenarios that ``elastic-train simulate`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from elastic_train.cli.guard import UserError
from elastic_train.cli.simulate_asked import (
    RECOVERIES,
    REPLACE,
    RUNS,
    STEP,
    Asked,
    check_asked,
    check_beside_trace,
    repair_of,
)
from elastic_train.cli.simulate_storage import saves_of, storage_lines, storage_of
from elastic_train.config.faults import LLAMA3_FAILURES, LLAMA3_SECONDS, TraceError, read_trace
from elastic_train.config.job import Job
from elastic_train.planner.simulation.confidence import Runs
from elastic_train.planner.simulation.costs import Pace, Tiers, elastic, restarts
from elastic_train.planner.simulation.events import simulate
from elastic_train.planner.simulation.failures import (
    Distribution,
    Failures,
    UnknownFailures,
    distribution,
    placed,
    rate,
    traced,
)
from elastic_train.planner.simulation.measured import Measured, NothingMeasured, measured
from elastic_train.planner.simulation.scenario import Growth, Outcome, Scenario
from elastic_train.planner.simulation.throughput import Throughput, planned, proportional

LLAMA3_NODES, LLAMA3_SPARES = 2048, 16
"""16,384 GPUs; the cluster had 24,000 (arXiv:2407.21783, section 3.3), so spares were never short."""
LLAMA3_MTBF = LLAMA3_SECONDS * LLAMA3_NODES / sum(cause.count for cause in LLAMA3_FAILURES.values())
"""Of one node of 8 GPUs, seconds."""
LLAMA3_CHECKPOINT, LLAMA3_STORAGE = "4870GB", "2TB/s"
"""12 bytes of each of 405.9e9 parameters; what the storage sustains (arXiv:2407.21783, section 3.3.1)."""
_MOST_FAILURES = 1e7


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the answer; ``outcomes(history)`` runs it."""

    name: str
    scenario: Scenario
    outcomes: Callable[[bool], list[Outcome]]


@dataclass(frozen=True, slots=True)
class Question:
    """``measured``: what is known of the real run that is simulated. ``notes``: sentences on what was assumed."""

    title: str
    cases: list[Case]
    measured: Measured | None = None
    notes: list[str] = field(default_factory=list)


def asked_of(asked: Asked) -> Question:
    """The scenarios of options and a job file. Raises UserError, ConfigError."""
    if asked.like not in (None, "llama3"):
        raise UserError(f"--like={asked.like}: must be llama3 (arXiv:2407.21783)")
    if asked.like:
        known = Asked(
            nodes=LLAMA3_NODES, gpus_per_node=8, days=54.0, spares=LLAMA3_SPARES, unit_nodes=16,
            checkpoint_size=LLAMA3_CHECKPOINT, storage_write=LLAMA3_STORAGE, storage_read=LLAMA3_STORAGE,
        )  # fmt: skip
        asked = replace(_filled(asked, known), recovery=asked.recovery or "both")
    job = _job(asked.job)
    if job is not None:
        each = asked.gpus_per_node or min(8, job.hosts.max)
        asked = _filled(asked, Asked(nodes=-(-job.hosts.max // each), gpus_per_node=each))
    asked = _filled(asked, Asked(gpus_per_node=8, spares=0))
    check_asked(asked)
    failures = _failures(asked)
    scenarios = _scenarios(asked, job, failures, _duration(asked, failures))
    count = 1 if failures.trace is not None else asked.runs or RUNS
    _check_number(scenarios, failures, count)
    cases = [_case(name, scenario, asked.seed, count) for name, scenario in scenarios.items()]
    first = cases[0].scenario
    title = (
        f"{first.nodes:,} nodes x {first.hosts_per_node} GPUs, {first.spares} spare, "
        f"{_length(first.duration)}; {_told(asked, failures, first.duration)}; "
        f"{count} run{'s' if count > 1 else ''} from seed {asked.seed}"
    )
    return Question(title, cases, notes=_notes(asked, job))


def _check_number(scenarios: dict[str, Scenario], failures: Failures, runs: int) -> None:
    scenario = next(iter(scenarios.values()))
    expected = failures.expected(scenario.places, scenario.duration) * runs
    if not expected <= _MOST_FAILURES:
        raise UserError(
            f"{expected:.2g} failures are to be expected in {runs} runs: at most {_MOST_FAILURES:.0e} can be "
            "simulated; give fewer --runs, --days or --nodes, or a longer --mtbf-hours"
        )


def _notes(asked: Asked, job: Job | None) -> list[str]:
    assert asked.nodes is not None and asked.gpus_per_node is not None
    hosts, notes = asked.nodes * asked.gpus_per_node, []
    if job is not None and job.hosts.max != hosts:
        used = "the job uses no more" if job.hosts.max > hosts else "the rest stands by"
        notes.append(f"{asked.job} asks for up to {job.hosts.max} hosts, the full cluster has {hosts}: {used}")
    if asked.pause is None:
        notes.append(
            "pauses: elastic's were measured with a small model on 4 hosts and one machine, restart's are assumed "
            "(10 minutes); +- is chance in the failures and leaves out how wrong these may be: try --pause"
        )
    notes += storage_lines(asked, job, storage_of(asked, job))
    if assumed := _assumed(asked):
        notes.append(f"assumed: {', '.join(assumed)}")
    return notes


def _assumed(asked: Asked) -> list[str]:
    """Options that were not given and that no measurement stands behind."""
    found = [f"--step {STEP:g}s"] if asked.step is None else []
    found += [f"--replace {REPLACE}"] if asked.replace is None else []
    if asked.recovery in ("restart", "both") and asked.checkpoint_stall is None:
        found.append("--checkpoint-stall 5 of restart")
    return found


def question_of_run(
    name: str, ledger: list[dict[str, object]], steps: list[dict[str, object]], asked: Asked
) -> Question:
    """A real run, again: its faults at their times, each run with other victims. Raises UserError."""
    try:
        seen = measured(ledger, steps, asked.seed)
    except NothingMeasured as error:
        raise UserError(f"{name}: {error}") from None

    def outcomes(history: bool) -> list[Outcome]:
        seeds = range(asked.seed, asked.seed + (asked.runs or RUNS))
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
    names = [each.name for each in fields(Asked) if getattr(known, each.name) != getattr(Asked(), each.name)]
    given = {name: getattr(asked, name) for name in names}
    fill = {name: getattr(known, name) for name, value in given.items() if value is None}
    return replace(asked, **fill)


def _failures(asked: Asked) -> Failures:
    try:
        if Path(asked.failures).suffix in (".jsonl", ".json", ".txt") or Path(asked.failures).is_file():
            check_beside_trace(asked)
            faults = read_trace(Path(asked.failures), asked.seed, asked.notice)
            places = placed(faults, asked.nodes or 1, asked.spares or 0, asked.seed)
            return Failures(trace=traced(faults, places, asked.seed))
        shape: Distribution = distribution(asked.failures)
        return Failures(
            mtbf=LLAMA3_MTBF * 8 / (asked.gpus_per_node or 8) if asked.mtbf_hours is None else 3600 * asked.mtbf_hours,
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
    storage = storage_of(asked, job)
    costs = restarts() if restart else elastic(job.failure if job else None, storage.load_seconds)
    if asked.pause is not None:
        pauses = {kind: pause.scaled(asked.pause) for kind, pause in costs.pauses.items()}
        costs = replace(costs, pauses=pauses, growth=costs.growth.scaled(asked.pause), per_host=0.0, load=0.0)
    partners = asked.partners if asked.partners is not None else job.snapshot.partners if job else 1
    return Scenario(
        nodes=nodes,
        hosts_per_node=each,
        spares=asked.spares,
        throughput=_throughput(asked, job, restart=restart),
        failures=failures,
        duration=duration,
        costs=costs,
        saves=saves_of(asked, job, storage, name),
        tiers=Tiers(memory=not restart, partners=partners),
        pace=Pace(asked.step or STEP),
        growth=Growth(job.hosts.growth_horizon_seconds, job.hosts.growth_margin) if job else Growth(),
        repair=repair_of(asked),
    )


def _throughput(asked: Asked, job: Job | None, *, restart: bool) -> Throughput:
    assert asked.nodes is not None and asked.gpus_per_node is not None
    each = asked.gpus_per_node
    full = asked.nodes * each
    if restart and asked.min_nodes is None:  # the same size again, or none
        return proportional(full, full)
    if job is not None:
        from elastic_train.planner.layouts import NoLayout

        try:
            return planned(job, {each: asked.nodes})
        except NoLayout as error:
            raise UserError(f"{asked.job}: {error}") from None
    return proportional(full, (asked.min_nodes or 1) * each, (asked.unit_nodes or 1) * each)


def _case(name: str, scenario: Scenario, seed: int, count: int) -> Case:
    return Case(name, scenario, lambda history: Runs(scenario, seed, count).outcomes(history=history))


def _length(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds:.4g} seconds"


def _told(asked: Asked, failures: Failures, duration: float) -> str:
    """The failures in words."""
    if failures.trace is not None:
        return f"{sum(each.at < duration for each in failures.trace)} failures of {asked.failures}"
    told = [f"a node fails once in {failures.mtbf / 3600:,.0f} hours ({asked.failures})"]
    if asked.rack_nodes:
        told.append(f"{asked.rack_nodes} nodes at once in {asked.rack_mtbf_hours:,.0f} hours")
    if asked.spot:
        told.append(f"reclaimed {asked.spot}")
    return ", ".join(told)
