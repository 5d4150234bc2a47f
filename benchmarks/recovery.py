"""Seconds from SIGKILL to the next finished step, for a trainer, a host process and a whole node.

    python benchmarks/recovery.py [--repeats 5] [--json results.json]

The quickstart's model (5 M parameters) on a local Ray cluster of a head and two worker nodes (real raylets), four
hosts, layout pp2 x dp_shard2. After every failure the benchmark waits until four hosts train again. Loopback and shared
cores: the figures are of this machine and are not to be set against a cluster's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.load import load_job
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.controller.run import run_job
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
HOSTS = 4
PARTS = ("detection", "teardown", "form", "restore", "first_step")
WAIT_SECONDS = 180.0


class Watch:
    """The latest status of the job, and waiting for one that is wanted."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._status: dict[str, Any] = {"state": "starting", "hosts": [], "step": 0, "generation": 0}

    def take(self, status: dict[str, Any]) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def wait(self, wanted: Any) -> dict[str, Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: wanted(self._status), WAIT_SECONDS):
                raise TimeoutError(f"not reached in {WAIT_SECONDS:.0f} s; last status: {self._status}")
            return self._status


def steady(status: dict[str, Any]) -> bool:
    return status["state"] == "running" and sum(host["rank"] is not None for host in status["hosts"]) == HOSTS


def fail(kind: str, status: dict[str, Any], cluster: LocalCluster, repeat: int) -> float:
    """Cause one failure; returns the moment of the SIGKILL (Unix seconds)."""
    host = status["hosts"][repeat % HOSTS]
    if kind == "node":
        node = cluster.node_of(host["pid"])
        assert node is not None
        moment = time.time()
        cluster.kill_node(node)
    else:
        moment = time.time()
        os.kill(host["trainer_pid"] if kind == "trainer" else host["pid"], signal.SIGKILL)
    return moment


def measure(watch: Watch, cluster: LocalCluster, steps: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """All failures of all kinds, one after the other."""
    results: dict[str, list[dict[str, float]]] = {}
    for kind in ("trainer", "host", "node"):
        for repeat in range(repeats):
            settled = watch.wait(steady)["step"] + 3
            status = watch.wait(lambda s, settled=settled: steady(s) and s["step"] >= settled)
            before = _lines(steps)[-1]
            moment = fail(kind, status, cluster, repeat)
            generation = status["generation"]
            watch.wait(lambda s, generation=generation: s["generation"] > generation and s["state"] == "running")
            after = next(line for line in _lines(steps) if line["generation"] > generation)
            formed = next(
                line
                for line in _lines(steps.with_name("ledger.jsonl"))
                if line["event"] == "generation_formed" and line["generation"] == after["generation"]
            )
            row = {
                "seconds": after["time"] - moment,
                "steps_lost": float(max(before["step"] + 1 - after["step"], 0)),
                "steady_step_seconds": before["seconds"],
                **{f"{part}_seconds": formed[f"{part}_seconds"] for part in PARTS},
            }
            results.setdefault(kind, []).append(row)
            print(f"{kind} {repeat + 1}: {row['seconds']:.2f} s, layout now {after['layout']}", flush=True)
            if kind == "node":
                cluster.add_nodes(1, HOSTS // 2)
    return results


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def table(results: dict[str, list[dict[str, float]]]) -> str:
    rows = ["| killed | median s | min | max | n | steps lost | steady step, s |", "|---|---|---|---|---|---|---|"]
    for kind, measured in results.items():
        seconds = [row["seconds"] for row in measured]
        lost = sum(row["steps_lost"] for row in measured)
        step = statistics.median(row["steady_step_seconds"] for row in measured)
        rows.append(
            f"| {kind} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {len(seconds)} "
            f"| {lost:.0f} | {step:.2f} |"
        )
    return "\n".join(rows)


def parts_table(results: dict[str, list[dict[str, float]]]) -> str:
    """Medians of what the ledger says of each recovery, in seconds."""
    rows = [f"| killed | {' | '.join(part.replace('_', ' ') for part in PARTS)} |", "|---" * (len(PARTS) + 1) + "|"]
    for kind, measured in results.items():
        medians = [statistics.median(row[f"{part}_seconds"] for row in measured) for part in PARTS]
        rows.append(f"| {kind} | {' | '.join(f'{seconds:.2f}' for seconds in medians)} |")
    return "\n".join(rows)


def _job(folder: Path) -> Job:
    overrides = ["name=recovery", f"storage.uri={folder}", f"data.uri={folder / 'data'}", "tracking.enabled=false"]
    overrides += ["training.steps=100000", "hosts.settle_seconds=0.5", "checkpoint.every_steps=1000"]
    overrides += ["hosts.growth_margin=0"]  # four hosts again after each failure
    job = load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", overrides)
    prepare(open_corpus("python-stdlib"), job.data.uri, job.model.vocab_size)
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every single measurement here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalCluster() as cluster:
        job = _job(Path(folder))
        cluster.add_nodes(2, HOSTS // 2)
        watch, results = Watch(), {}

        def drive() -> None:
            try:
                steps = Path(folder) / job.name / "steps.jsonl"
                results.update(measure(watch, cluster, steps, arguments.repeats))
            finally:
                if running.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)  # ends the job gracefully

        running = threading.Event()
        running.set()
        thread = threading.Thread(target=drive)
        thread.start()
        try:
            outcome = run_job(job, address=cluster.address, on_status=watch.take)
        finally:
            running.clear()
        thread.join()
        print(f"job: {outcome.state} {outcome.message}")
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(results))
    print(f"\n{parts_table(results)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
