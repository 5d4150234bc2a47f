"""What snapshots cost the steps of the quickstart's model: four hosts on two nodes of a local Ray cluster.

Per step, of its slowest rank: ``stall`` is how long the update waited because of snapshots, which is all that is in the
step's path; ``copy`` is how long the copy into shared memory took beside the next step. ``step`` is the time from the
end of a step to the end of the next one.

    python benchmarks/stall.py [--steps 60] [--json stall.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elastic_train.config.job import Job
from elastic_train.config.load import load_job
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.controller.run import run_job
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
HOSTS = 4
WARM_UP = 10
"""Steps that are left out: the first ones allocate the images and fill caches."""


def measure(folder: Path, steps: int, overrides: Sequence[str]) -> list[dict[str, float]]:
    """One job of ``steps`` steps after the warm-up; seconds per step."""
    job = _job(folder, steps + WARM_UP, overrides)
    with LocalCluster() as cluster:
        cluster.add_nodes(2, HOSTS // 2)
        outcome = run_job(job, address=cluster.address)
    if outcome.state != "finished":
        raise RuntimeError(f"the job {outcome.state}: {outcome.message}")
    lines = [json.loads(line) for line in (folder / job.name / "steps.jsonl").read_text().splitlines()]
    return [
        {
            "step": after["time"] - before["time"],
            "compute": after["seconds"],
            "stall": after["stall_seconds"],
            "copy": after["snapshot_seconds"],
        }
        for before, after in itertools.pairwise(lines[WARM_UP - 1 :])
    ]


def _job(folder: Path, steps: int, overrides: Sequence[str]) -> Job:
    settings = ["name=stall", f"storage.uri={folder}", f"data.uri={folder / 'data'}", "tracking.enabled=false"]
    settings += [f"training.steps={steps}", f"hosts.min={HOSTS}", "checkpoint.every_steps=1000", *overrides]
    job = load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", settings)
    prepare(open_corpus("python-stdlib"), job.data.uri, job.model.vocab_size)
    return job


def table(rows: Sequence[dict[str, float]]) -> str:
    """Median, 95th percentile and largest value of each, in ms, and the share of the median step."""
    step = statistics.median(row["step"] for row in rows)
    lines = ["| | median ms | p95 ms | max ms | median, % of a step |", "|---|---|---|---|---|"]
    for name in rows[0]:
        values = sorted(row[name] for row in rows)
        median, p95 = statistics.median(values), statistics.quantiles(values, n=20)[-1]
        lines.append(
            f"| {name} | {median * 1e3:.2f} | {p95 * 1e3:.2f} | {values[-1] * 1e3:.2f} | {100 * median / step:.2f} |"
        )
    total = sum(row["stall"] for row in rows) / sum(row["step"] for row in rows)
    return "\n".join([*lines, "", f"stall in all: {100 * total:.2f} % of {len(rows)} steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="changes to the quickstart's job")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write every single measurement here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.steps, arguments.overrides)
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
