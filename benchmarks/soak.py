"""Llama 3's 54 days of failures compressed a thousandfold against one job, and the same job left in peace.

    python -m benchmarks.soak [--for 600] [--speed 1000] [--seed 1] [--json results.json] [--logs folder]

The quickstart's model (5 M parameters) on sequences of 64 tokens, ``determinism: exact``, on four hosts of a local Ray
cluster (a head, two worker nodes, real raylets) with an object storage (SeaweedFS). ``elastic-train chaos llama3``
strikes once per 11.1 s on average, in the mix of the paper (arXiv:2407.21783, table 5); a lost node is replaced after
``--replace`` seconds, as a cloud would. Then the job is stopped, and run once more without failures up to the same
step. Printed: goodput by the ledger, its causes, samples lost or repeated, and whether the final weights are the
same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from elastic_train.checkpoint.hf_export import export_hf
from elastic_train.config.job import Job
from elastic_train.config.load import load_job
from elastic_train.controller.job_folder import job_store
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.controller.local_node import LocalNode
from elastic_train.controller.time_account import account_of_runs
from elastic_train.data.audit import audit_steps
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare
from elastic_train.data.sources import open_training
from elastic_train.storage.json_lines import read_json_lines
from elastic_train.storage.store import Store
from tests.ray_job import RayJob
from tests.s3_server import S3Server, running_s3_server

ROOT = Path(__file__).resolve().parents[1]
NODES, SEATS = 2, 2
STEPS = 100_000
BUCKET = "soak"


def job_of(server: S3Server, data: Path, name: str, *overrides: str) -> Job:
    """The job, which differs between the two runs in its name and in when it saves."""
    common = [f"name={name}", f"storage.uri=s3://{BUCKET}", f"storage.endpoint_url={server.endpoint_url}"]
    common += [f"data.uri={data}", "tracking.enabled=false"]
    common += [f"training.steps={STEPS}", "data.sequence_length=64", "training.determinism=exact"]
    common += ["hosts.settle_seconds=0.5", "failure.hang_seconds=2", "failure.lease_seconds=4"]
    return load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", [*common, *overrides])


class Cloud:
    """Takes away the nodes that it has given notice of, and starts others in their place.

    For a node with notice at the time of the notice, as clouds do (EC2's capacity rebalancing); for one that is lost
    after ``pause`` seconds.
    """

    def __init__(self, cluster: LocalCluster, run: RayJob, pause: float) -> None:
        self.count = Counter[str]()
        self._cluster, self._run, self._pause = cluster, run, pause
        self._homes: dict[str, LocalNode | None] = {}
        """Ray's id of a node -> the node"""
        self._leaving: dict[str, float] = {}
        """Ray's id of a node -> when it is taken away; events are only seen for a while"""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Cloud:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self._take_away()
            for node in [node for node in self._cluster.nodes[1:] if node.process.poll() is not None]:
                self._cluster.kill_node(node)  # what is left of it
                self.count["lost"] += 1
                self._over.wait(self._pause)
            leaving = [self._homes.get(name) for name in self._leaving]
            missing = NODES - sum(node not in leaving for node in self._cluster.nodes[1:])
            if missing > 0 and not self._over.is_set():
                self._cluster.add_nodes(missing, SEATS)
                self.count["replaced"] += missing

    def _take_away(self) -> None:
        status = self._run.status
        for host in status["hosts"]:
            self._homes.setdefault(host["node"], self._cluster.node_of(host["pid"]))
        for event in status.get("last_events", ()):
            if event["event"] == "preemption_notice":
                self._leaving.setdefault(event["node"], event["time"] + event["deadline_seconds"])
        for name in [name for name, deadline in self._leaving.items() if time.time() > deadline]:
            del self._leaving[name]
            node = self._homes.pop(name, None)
            if node is not None and node in self._cluster.nodes:
                node.kill()
                self.count["taken away"] += 1


def struck(job: Job, cluster: LocalCluster, arguments: argparse.Namespace) -> tuple[dict[str, Any], Counter[str], str]:
    """Run the job under fire; returns its outcome, the nodes lost and replaced, and what the chaos command printed."""
    with RayJob(job, cluster.address) as run, Cloud(cluster, run, arguments.replace) as cloud:
        run.wait(lambda status: status["step"] >= 10, 240)
        command = [sys.executable, "-m", "elastic_train.cli.main", "chaos", "llama3", job.name, "--lasting", "10s"]
        command += ["--speed", str(arguments.speed), "--for", f"{arguments.duration}s", "--seed", str(arguments.seed)]
        chaos = subprocess.Popen([*command, "--address", cluster.address], stdout=subprocess.PIPE, text=True)
        assert chaos.stdout is not None
        told = []
        for line in chaos.stdout:
            print(line, end="", flush=True)
            told.append(line)
        chaos.wait()
        run.driver.send_signal(signal.SIGTERM)
        return run.finish(), cloud.count, "".join(told)


def in_peace(job: Job, step: int, cluster: LocalCluster) -> None:
    """Run the job until its checkpoint of ``step`` is there."""
    with RayJob(job, cluster.address) as run:
        run.wait(lambda status: status["step"] >= step, 7200)
        deadline = time.monotonic() + 60
        while not committed(job, step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no checkpoint of step {step}")
            time.sleep(0.1)
        run.driver.send_signal(signal.SIGTERM)
        run.finish()


def committed(job: Job, step: int) -> bool:
    events = read_json_lines(job_store(job), "ledger.jsonl")
    return any(event["event"] == "checkpoint_committed" and event["step"] == step for event in events)


def keep_logs(job: Job, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ledger.jsonl", "steps.jsonl"):
        lines = read_json_lines(job_store(job), name)
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def weights(job: Job, step: int, folder: Path) -> dict[str, bytes]:
    """The files of the exported float32 model: equal bytes are equal bits of every weight."""
    out = export_hf(job_store(job), step, Store.open(job.data.uri), folder / job.name)
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


def report(job: Job, calm: Job, outcome: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All figures of the two runs."""
    store, step = job_store(job), outcome["step"]
    lines, ledger = (read_json_lines(store, f"{name}.jsonl") for name in ("steps", "ledger"))
    calm_lines = read_json_lines(job_store(calm), "steps.jsonl")[:step]
    data = open_training(job)
    formed = [event for event in ledger if event["event"] == "generation_formed" and event["cause"] != "start"]
    account = account_of_runs(ledger)
    assert account is not None
    return {
        "goodput": account["goodput"],
        "goodput_without_start": account["seconds"]["useful"]
        / (account["host_seconds"] - account["seconds"].get("start", 0.0)),
        "host_seconds": account["host_seconds"],
        "seconds": account["seconds"],
        "step": step,
        "steps_once_in_order": [line["step"] for line in lines] == list(range(1, step + 1)),
        "sample_problems": audit_steps(lines, data.batches, [("", len(data.datasets[0]))]).problems,
        "chaos": Counter(event["kind"] for event in ledger if event["event"] == "chaos"),
        "causes": Counter(event["cause"] for event in formed),
        "recovery_seconds": sorted(round(event["recovery_seconds"], 2) for event in formed),
        "rolled_back": sum(event["event"] == "rolled_back" for event in ledger),
        "losses_equal": [line["loss"] for line in lines] == [line["loss"] for line in calm_lines],
        "weights_equal": weights(job, step, folder) == weights(calm, step, folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", type=float, default=600.0, dest="duration", help="seconds of chaos")
    parser.add_argument("--speed", type=float, default=1000.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replace", type=float, default=2.0, help="seconds until a lost node is replaced")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="where ledger.jsonl and steps.jsonl of the struck job are kept")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_s3_server(memory="400MiB") as server:
        folder = Path(name)
        server.create_bucket(BUCKET)
        os.environ.update(server.environment)
        job = job_of(server, folder / "data", "soak", "checkpoint.every_steps=100")
        prepare(open_corpus("python-stdlib"), job.data.uri, job.model.vocab_size)
        with LocalCluster() as cluster:
            cluster.add_nodes(NODES, SEATS)
            outcome, nodes, _ = struck(job, cluster, arguments)
            print(f"job: {outcome['state']} at step {outcome['step']}; nodes {dict(nodes)}", flush=True)
            calm = job_of(server, folder / "data", "calm", f"checkpoint.every_steps={outcome['step']}")
            in_peace(calm, outcome["step"], cluster)
        if arguments.logs:
            keep_logs(job, arguments.logs)
        results = report(job, calm, outcome, folder)
    print(json.dumps(results, indent=1, default=dict))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
