"""Seconds from a failure to the next new step: torchrun, Ray Train V2 and torchft, beside ``benchmarks/recovery.py``.

    python -m benchmarks.recovery_peers [--only torchrun ray torchft] [--repeats 3] [--torchft PYTHON] [--json FILE]

The quickstart's model (5 M parameters, 8 sequences of 256 tokens per step) on four gloo ranks of one thread. torchrun
and Ray Train run FSDP2 with a distributed checkpoint to /dev/shm every ten steps; torchft replicates, and its timeouts
are 5 s, a few steps, instead of its 60. A *new* step is one beyond the last that was finished before the failure, on
whatever ranks are left or were started again; a hang that is not found within ``--patience`` seconds is given as such.
torchft is not among our dependencies: give the Python of an environment that has ``torchft-nightly``, torch and
pydantic. Loopback and shared cores: figures of this machine, to be set beside ours of the same run only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from elastic_train.controller.local_cluster import LocalCluster, free_port

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
STEADY = 12
"""Steps before a failure, so that there is a checkpoint."""
START_SECONDS = 240.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}

Strike = Callable[["Peer"], float]


class NotFound(Exception):
    """The failure was not survived within the patience."""


class Peer:
    """A running job of four ranks; each writes its steps into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self) -> list[dict[str, Any]]:
        """Of all ranks, by time. A rank that is being killed may leave half a line."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return sorted(found, key=lambda line: line["time"])

    def newest(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def pids(self) -> list[int]:
        """Of the ranks that have written a step and still run."""
        return [pid for path in self.folder.glob("*.jsonl") if psutil.pid_exists(pid := int(path.stem))]

    def wait(self, step: int, seconds: float) -> float:
        """When a step of at least that number was finished first."""
        deadline = time.monotonic() + seconds
        while self.newest() < step:
            if time.monotonic() > deadline:
                raise NotFound(f"step {step} was not reached in {seconds:.0f} s")
            time.sleep(0.02)
        return float(next(line["time"] for line in self.lines() if line["step"] >= step))


@contextmanager
def running(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process and, at the end, no more of its children."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            child.kill()
        process.wait()


@contextmanager
def torchrun(folder: Path) -> Iterator[Peer]:
    """With the fix for the store that torch 2.13 shares between restarts."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--max-restarts=1000"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port('127.0.0.1')}", "--rdzv-id=peer"]
    command += ["-m", "benchmarks.peers.torchrun_worker", str(folder)]
    with running(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
        yield Peer(folder)


class RayPeer(Peer):
    """Two worker nodes with two workers each."""

    cluster: LocalCluster


@contextmanager
def ray_train(folder: Path) -> Iterator[Peer]:
    with LocalCluster() as cluster:
        cluster.add_nodes(2, RANKS // 2)
        worker = ["-m", "benchmarks.peers.ray_train_worker", cluster.address, str(folder), str(RANKS // 2), str(RANKS)]
        with running([sys.executable, *worker], RAY_TRAIN_V2_ENABLED="1"):
            peer = RayPeer(folder)
            peer.cluster = cluster
            yield peer


class TorchftPeer(Peer):
    """Four replicas of one rank each; one that died is started again, as a scheduler would."""

    def __init__(self, folder: Path, start: Callable[[int], None]) -> None:
        super().__init__(folder)
        self.start = start


def torchft_with(python: str) -> Callable[[Path], Any]:
    @contextmanager
    def torchft(folder: Path) -> Iterator[Peer]:
        port = free_port("127.0.0.1")
        lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--min_replicas=1", "--join_timeout_ms=1000"]
        lighthouse += [f"--bind=127.0.0.1:{port}", "--heartbeat_timeout_ms=1000"]
        with ExitStack() as stack:
            stack.enter_context(running(lighthouse))

            def start(replica: int) -> None:
                command = [python, "-m", "benchmarks.peers.torchft_worker", str(folder), str(replica)]
                stack.enter_context(running(command, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}"))

            for replica in range(RANKS):
                start(replica)
            yield TorchftPeer(folder, start)

    return torchft


def kill_rank(peer: Peer) -> float:
    moment = time.time()
    os.kill(random.choice(peer.pids()), signal.SIGKILL)
    return moment


def stop_rank(peer: Peer) -> float:
    moment = time.time()
    os.kill(random.choice(peer.pids()), signal.SIGSTOP)
    return moment


def kill_node(peer: Peer) -> float:
    """The raylet of a worker node and all its processes."""
    assert isinstance(peer, RayPeer)
    node = peer.cluster.node_of(random.choice(peer.pids()))
    assert node is not None
    moment = time.time()
    peer.cluster.kill_node(node)
    return moment


FAILURES: dict[str, dict[str, Strike]] = {
    "torchrun": {"trainer": kill_rank, "hang": stop_rank},
    "ray": {"trainer": kill_rank, "node": kill_node, "hang": stop_rank},
    "torchft": {"trainer": kill_rank, "hang": stop_rank},
}


def measure(start: Any, strike: Strike, patience: float) -> dict[str, float]:
    """Start a job, let it step, cause one failure, wait for the next new step."""
    folder = Path(tempfile.mkdtemp(prefix="et-peer-", dir="/dev/shm"))
    try:
        with start(folder) as peer:
            peer.wait(STEADY, START_SECONDS)
            while len(peer.pids()) < RANKS:  # the others of torchft join a moment later
                time.sleep(0.1)
            reached = peer.newest() + 2
            peer.wait(reached, START_SECONDS)
            steady = statistics.median(line["seconds"] for line in peer.lines()[-20:])
            moment = strike(peer)
            before = max(line["step"] for line in peer.lines() if line["time"] <= moment)
            after = peer.wait(before + 2, patience)  # the step in flight may be over before the failure is felt
            repeated = sum(line["step"] <= before for line in peer.lines() if line["time"] > moment) / RANKS
            return {"seconds": after - moment, "steady_step_seconds": steady, "steps_repeated": repeated}
    finally:
        shutil.rmtree(folder)


def table(results: dict[str, list[dict[str, float]]], patience: float) -> str:
    rows = [
        "| peer, failure | median s | min | max | n | steps repeated | steady step, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, measured in results.items():
        seconds = [row["seconds"] for row in measured if row]
        if not seconds:
            rows.append(f"| {name} | not in {patience:.0f} | | | {len(measured)} | | |")
            continue
        repeated = statistics.median(row["steps_repeated"] for row in measured if row)
        steady = statistics.median(row["steady_step_seconds"] for row in measured if row)
        rows.append(
            f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {len(seconds)} "
            f"| {repeated:.0f} | {steady:.2f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(FAILURES), default=list(FAILURES))
    parser.add_argument("--failures", nargs="*", choices=["trainer", "node", "hang"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=180.0)
    parser.add_argument("--torchft", help="Python of an environment with torchft-nightly; else torchft is left out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    starts: dict[str, Any] = {"torchrun": torchrun, "ray": ray_train}
    if arguments.torchft:
        starts["torchft"] = torchft_with(arguments.torchft)
    results: dict[str, list[dict[str, float]]] = {}
    for peer in [name for name in arguments.only if name in starts]:
        for kind, strike in FAILURES[peer].items():
            if arguments.failures and kind not in arguments.failures:
                continue
            for _ in range(arguments.repeats):
                try:
                    row = measure(starts[peer], strike, arguments.patience)
                except NotFound as error:
                    print(f"{peer}, {kind}: {error}", flush=True)
                    results.setdefault(f"{peer}, {kind}", []).append({})
                    break  # it would not be found the next time either
                results.setdefault(f"{peer}, {kind}", []).append(row)
                print(f"{peer}, {kind}: {row['seconds']:.2f} s", flush=True)
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(results, arguments.patience))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
