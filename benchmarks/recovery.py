"""Seconds from a failure to the next finished step, for each kind of failure, on four hosts.

    python -m benchmarks.recovery [--repeats 5] [--only trainer hang ...] [--json results.json]

The quickstart's model (5 M parameters), layout pp2 x dp_shard2, on a local Ray cluster of a head and two worker nodes
(real raylets). After every failure the benchmark waits until four hosts train again. ``trainer``, ``host`` and ``node``
are killed (SIGKILL); ``hang``: a trainer is stopped (SIGSTOP), with ``failure.hang_seconds`` 0.5; ``drain``: Ray is
told that a node ends in 20 s, and the seconds are between two finished steps; ``growth``: between two finished steps,
too, as two hosts are joined by those of a node that is added; ``coordinator`` is killed, and the seconds are what the
longest step until its return takes beyond a usual one; ``partition``: without Ray, one of four hosts in network
namespaces of their own loses its link, with ``failure.lease_seconds`` 4 (needs root). A pause is what is beyond a usual
step, of growth one on four hosts. Beside the medians stands what is aimed at, and whether that is met. Loopback and
shared cores: the figures are of this machine and are not to be set against a cluster's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.recovery_report import PARTS, Row, parts_table, table
from elastic_train.cluster.networks import Network
from elastic_train.config.job import Job
from elastic_train.config.load import load_job
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare
from tests.local_job import LocalJob
from tests.ray_job import RayJob, kill_coordinator, refill

ROOT = Path(__file__).resolve().parents[1]
HOSTS = 4
WAIT_SECONDS = 180.0
SETTLED_STEPS = 5
"""Steps on four hosts before the next failure."""
WATCHED_STEPS = 20
"""Without a coordinator, and before that for comparison."""

Status = dict[str, Any]


def train(status: Status, hosts: int) -> bool:
    return status["state"] == "running" and sum(host["rank"] is not None for host in status["hosts"]) == hosts


class Bench:
    """A job that runs, and what it has written so far."""

    def __init__(self, run: RayJob | LocalJob, folder: Path) -> None:
        self._run, self._folder = run, folder

    def settle(self, hosts: int = HOSTS) -> Status:
        """Wait until so many hosts have trained for some steps."""
        settled = self._run.wait(lambda status: train(status, hosts), WAIT_SECONDS)["step"] + SETTLED_STEPS
        return self._run.wait(lambda status: train(status, hosts) and status["step"] >= settled, WAIT_SECONDS)

    def await_hosts(self, count: int) -> Status:
        """Until only so many are there."""
        return self._run.wait(lambda status: len(status["hosts"]) == count, WAIT_SECONDS)

    def await_generation(self, after: int) -> None:
        self._run.wait(lambda status: status["generation"] > after and status["state"] == "running", WAIT_SECONDS)

    def await_step(self, step: int) -> None:
        self._run.wait(lambda status: status["step"] >= step, WAIT_SECONDS)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of ``steps`` or ``ledger``; the last one may still be written."""
        text = (self._folder / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def recovery(self, strike: Callable[[Status], None], *, planned: bool = False) -> Row:
        """From the strike, or when it was ``planned`` from the last step before, to the first finished step after."""
        status = self.settle()
        moment = time.time()
        strike(status)
        self.await_generation(status["generation"])
        steps = self.lines("steps")
        after = next(line for line in steps if line["generation"] > status["generation"])
        earlier = [line for line in steps if line["generation"] == status["generation"]]
        before = earlier[-1] if planned else [line for line in earlier if line["time"] <= moment][-1]
        usual = statistics.median(line["seconds"] for line in earlier[-10:])
        return self._row(before, after, after["time"] - (before["time"] if planned else moment), usual)

    def growth(self, add: Callable[[], None]) -> Row:
        """From the last step of half of the hosts to the first of all."""
        self.settle(HOSTS // 2)
        add()
        number = self.settle()["generation"]
        steps = self.lines("steps")
        before = [line for line in steps if line["generation"] < number][-1]
        first, *others = [line for line in steps if line["generation"] == number]
        usual = statistics.median(line["seconds"] for line in others)
        return self._row(before, first, first["time"] - before["time"], usual)

    def _row(self, before: dict[str, Any], after: dict[str, Any], seconds: float, usual: float) -> Row:
        """``before`` and ``after``: the lines of the last step that counted and of the first one on."""
        events = [line for line in self.lines("ledger") if line["event"] == "generation_formed"]
        formed = next(event for event in events if event["generation"] == after["generation"])
        return {
            "seconds": seconds,
            "pause": seconds - usual,
            "steps_lost": float(max(before["step"] - formed["step"], 0)),
            "steady_step_seconds": usual,
            **{f"{part}_seconds": formed[f"{part}_seconds"] for part in PARTS},
        }

    def stall(self, strike: Callable[[Status], None]) -> Row:
        """What the longest of the next steps takes beyond a usual one, and what that of as many steps before took."""
        begin = self.settle()["step"]
        self.await_step(begin + WATCHED_STEPS)
        status = self.settle()
        strike(status)
        self.await_step(status["step"] + WATCHED_STEPS)
        took = {line["step"]: line["seconds"] + line["stall_seconds"] for line in self.lines("steps")}
        before = [took[step] for step in range(status["step"] - WATCHED_STEPS + 1, status["step"] + 1)]
        usual, longest = statistics.median(before), max(s for step, s in took.items() if step > status["step"])
        adopted = [event for event in self.lines("ledger") if event["event"] == "generation_adopted"]
        if not adopted:
            raise RuntimeError("the coordinator did not adopt the generation")
        row = {"seconds": longest - usual, "pause": max(longest - max(before), 0.0), "without": max(before) - usual}
        return row | {"steady_step_seconds": usual, "steps_lost": 0.0}


def kill(kind: str, number: int) -> Callable[[Status], None]:
    """SIGKILL, or SIGSTOP for a hang, of another host's process each time."""

    def strike(status: Status) -> None:
        host = status["hosts"][number % HOSTS]
        pid = host["pid"] if kind == "host" else host["trainer_pid"]
        os.kill(pid, signal.SIGSTOP if kind == "hang" else signal.SIGKILL)

    return strike


def drain(cluster: LocalCluster, name: str) -> None:
    """By the command, which takes seconds to start: what it does is timed by the ledger."""
    command = [sys.executable, "-m", "elastic_train.cli.main", "chaos", "drain", name, "--lasting", "20s"]
    subprocess.run([*command, "--address", cluster.address], check=True, capture_output=True)


def kill_node(cluster: LocalCluster, number: int) -> Callable[[Status], None]:
    """Of another host each time."""

    def strike(status: Status) -> None:
        node = cluster.node_of(status["hosts"][number % HOSTS]["pid"])
        assert node is not None
        cluster.kill_node(node)

    return strike


def measure(kind: str, number: int, bench: Bench, cluster: LocalCluster, job: Job) -> Row:
    """One failure, or growth after one."""
    if kind == "coordinator":
        return bench.stall(lambda status: kill_coordinator(cluster))
    if kind == "growth":
        kill_node(cluster, number)(bench.settle())
        return bench.growth(lambda: refill(cluster, nodes=2, cpus=HOSTS // 2))
    if kind == "drain":
        row = bench.recovery(lambda status: drain(cluster, job.name), planned=True)
        homes = {id(cluster.node_of(host["pid"])) for host in bench.await_hosts(HOSTS // 2)["hosts"]}
        for node in [node for node in cluster.nodes[1:] if id(node) not in homes]:
            cluster.kill_node(node)  # which is what the notice was about
    elif kind == "node":
        row = bench.recovery(kill_node(cluster, number))
    else:
        row = bench.recovery(kill(kind, number))
    refill(cluster, nodes=2, cpus=HOSTS // 2)
    return row


def on_ray(kinds: list[str], repeats: int, folder: Path) -> dict[str, list[Row]]:
    """All failures of one job on real raylets, one after the other."""
    results: dict[str, list[Row]] = {}
    with LocalCluster() as cluster:
        job = job_of(folder, "recovery", "failure.hang_seconds=0.5", "failure.heartbeat_seconds=0.1")
        refill(cluster, nodes=2, cpus=HOSTS // 2)
        with RayJob(job, cluster.address) as run:
            bench = Bench(run, folder / job.name)
            for kind in kinds:
                for number in range(repeats):
                    row = measure(kind, number, bench, cluster, job)
                    results.setdefault(kind, []).append(row)
                    print(f"{kind} {number + 1}: {row['seconds']:.2f} s, pause {row['pause']:.2f} s", flush=True)
            run.driver.send_signal(signal.SIGTERM)
            print(f"job: {run.finish()['state']}")
    return results


def partitions(repeats: int, folder: Path) -> list[Row]:
    """Four hosts in namespaces of their own; the link of one goes down, and up again once the others have gone on."""
    rows = []
    job = job_of(folder, "partition", "failure.lease_seconds=4", "failure.heartbeat_seconds=0.25")
    with Network() as network, LocalJob(job, address=network.address) as run:
        machines = {f"node{number}": network.add() for number in range(HOSTS)}
        for node, machine in machines.items():
            run.start_host(node, node, machine)
        bench = Bench(run, folder / job.name)
        for number in range(repeats):
            node = f"node{number % HOSTS}"
            row = bench.recovery(lambda status, node=node: machines[node].cut())
            rows.append(row)
            print(f"partition {number + 1}: {row['seconds']:.2f} s", flush=True)
            machines[node].reconnect()  # its host comes back by itself
        run.stop()
        run.finish()
    return rows


def job_of(folder: Path, name: str, *overrides: str) -> Job:
    """The quickstart's job without an end and nearly without saves, which takes newcomers in at once."""
    common = [f"name={name}", f"storage.uri={folder}", f"data.uri={folder / 'data'}", "tracking.enabled=false"]
    common += ["training.steps=100000", "hosts.settle_seconds=0.5", "checkpoint.every_steps=1000"]
    job = load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", [*common, "hosts.growth_margin=0", *overrides])
    prepare(open_corpus("python-stdlib"), job.data.uri, job.model.vocab_size)
    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["trainer", "hang", "host", "node", "drain", "growth", "coordinator", "partition"]
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--json", type=Path, help="write every single measurement here")
    arguments = parser.parse_args()
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if by_ray := [kind for kind in arguments.only if kind != "partition"]:
            results |= on_ray(by_ray, arguments.repeats, Path(folder))
        if "partition" in arguments.only:
            results["partition"] = partitions(arguments.repeats, Path(folder))
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(results))
    print(f"\n{parts_table(results)}")
    if rows := results.get("coordinator"):
        median = statistics.median(row["without"] for row in rows)
        print(f"\ncoordinator: in as many steps with it the longest took {median:.2f} s beyond a usual one")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
