"""How long the simulator takes for 16,384 GPUs and 54 days, and how many events that is.

    python -m benchmarks.simulator [--runs 5]

Llama 3's cluster and failures (``elastic-train simulate --like llama3``), recovered by this engine and by restarts of
the whole job; then other numbers of nodes. Seconds are of one run on one core, drawing of its failures included.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import asked_of
from elastic_train.planner.simulation.events import simulate
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print("| recovery | GPUs | CPU s per run | failures | events | ETTR % |\n|---|---|---|---|---|---|")
    cases = asked_of(Asked(like="llama3")).cases
    for case in cases:
        timed(case.name, case.scenario, runs)
    for nodes in (128, 512, 8192):
        hosts = nodes * 8
        timed("elastic", replace(cases[0].scenario, nodes=nodes, throughput=proportional(hosts, 128, 128)), runs)


if __name__ == "__main__":
    main()
