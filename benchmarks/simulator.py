"""How long the simulator takes for 16,384 GPUs and 54 days, and how near it comes to a real run.

    python -m benchmarks.simulator speed [--runs 5]
    python -m benchmarks.simulator again LOGS [--runs 20] [--keep FOLDER]

``speed``: Llama 3's cluster and failures (``elastic-train simulate --like llama3``), recovered by this engine and by
restarts of the whole job; then other numbers of nodes. Seconds are of one run on one core, drawing of its failures
included.

``again``: a run whose ``ledger.jsonl`` and ``steps.jsonl`` are in LOGS (``benchmarks.soak --logs LOGS``) is simulated
from them, as ``elastic-train simulate --from`` does, and shares of the hosts' time stand beside the measured ones.
``--keep`` writes what the simulator reads of the logs, every fifth step alone (``tests/planner/simulation/soak``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import asked_of
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.events import simulate
from elastic_train.planner.simulation.measured import PARTS, measured
from elastic_train.planner.simulation.scenario import Scenario
from elastic_train.planner.simulation.throughput import proportional


def timed(name: str, scenario: Scenario, runs: int) -> None:
    """Print a row: medians over ``runs`` seeds."""
    rows = []
    for seed in range(1, runs + 1):
        begin = time.process_time()
        outcome = simulate(scenario, seed)
        rows.append((time.process_time() - begin, outcome))
    seconds, outcome = sorted(rows, key=lambda row: row[0])[runs // 2]
    figures = f"{seconds:.2f} | {outcome.failures:,} | {outcome.events:,} | {100 * outcome.ettr:.2f}"
    print(f"| {name} | {scenario.nodes * scenario.hosts_per_node:,} | {figures} |", flush=True)


def speed(runs: int) -> None:
    print("| recovery | GPUs | CPU s per run | failures | events | ETTR % |\n|---|---|---|---|---|---|")
    cases = asked_of(Asked(like="llama3")).cases
    for case in cases:
        timed(case.name, case.scenario, runs)
    for nodes in (128, 512, 8192):
        hosts = nodes * 8
        timed("elastic", replace(cases[0].scenario, nodes=nodes, throughput=proportional(hosts, 128, 128)), runs)


READ = {
    "job_started": (),
    "host_joined": ("node",),
    "host_lost": ("node",),
    "host_left": ("node",),
    "preemption_notice": ("node",),
    "chaos": ("kind", "victim", "seconds"),
    "generation_formed": (
        "layout",
        "hosts",
        "spares",
        "cause",
        "recovery_seconds",
        *(f"{part}_seconds" for part in PARTS),
    ),
    "checkpoint_committed": ("step", "seconds"),
    "time_account": ("goodput", "hosts", "seconds"),
}
"""Events of the ledger and their fields that the simulator reads, beside ``event`` and ``time``."""
Lines = list[dict[str, Any]]


def logs(folder: Path) -> tuple[Lines, Lines]:
    """Ledger and steps."""
    ledger, steps = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("ledger", "steps")
    )
    return ledger, steps


def read_by_the_simulator(ledger: Lines, steps: Lines) -> tuple[Lines, Lines]:
    """Of the account of time the last one, of steps every fifth."""
    accounts = [line for line in ledger if line["event"] == "time_account"]
    kept = [line for line in ledger if line["event"] in READ and line not in accounts[:-1]]
    return (
        [{name: line[name] for name in ("event", "time", *READ[line["event"]])} for line in kept],
        [{name: line[name] for name in ("step", "time", "seconds", "layout")} for line in steps[::5]],
    )


def again(folder: Path, runs: int, keep: Path | None) -> None:
    ledger, steps = logs(folder)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for name, lines in zip(("ledger", "steps"), read_by_the_simulator(ledger, steps), strict=True):
            (keep / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    seen = measured(ledger, steps)
    outcomes = [simulate(measured(ledger, steps, seed).scenario()) for seed in range(1, runs + 1)]
    total = sum(seen.seconds.values())
    print("| cause | measured % | simulated % |\n|---|---|---|")
    for cause in (cause for cause in Cause if any(cause in each for each in (seen.seconds, outcomes[0].seconds))):
        share = statistics.fmean(100 * run.seconds.get(cause, 0.0) / run.host_seconds for run in outcomes)
        print(f"| {cause.value} | {100 * seen.seconds.get(cause, 0.0) / total:.1f} | {share:.1f} |")
    goodputs = [100 * run.goodput for run in outcomes]
    print(
        f"\ngoodput of {len(seen.faults)} failures in {seen.duration:.0f} s: measured {100 * seen.goodput:.1f} %, "
        f"simulated {statistics.fmean(goodputs):.1f} % ({min(goodputs):.1f} to {max(goodputs):.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("speed").add_argument("--runs", type=int, default=5)
    one = commands.add_parser("again")
    one.add_argument("logs", type=Path)
    one.add_argument("--runs", type=int, default=20)
    one.add_argument("--keep", type=Path, help="folder for a copy with what is read alone")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.runs)
    else:
        again(arguments.logs, arguments.runs, arguments.keep)


if __name__ == "__main__":
    main()
