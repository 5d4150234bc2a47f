"""What elasticity adds to a normal step: whole jobs beside the same engine without one, by turns in one run.

    python -m benchmarks.step_cost [--rounds 8] [--seconds 8] [--json results.json]

The quickstart's model (5 M parameters), layout pp2 x dp_shard2, four gloo ranks with one thread each. ``engine``: four
processes that step and do nothing else. ``job``: four hosts on two nodes (local processes, no Ray) with all that a step
of a job brings: the snapshot into shared memory, its copy to a partner on the other node, the trainers' agreement on
what is finished, heartbeats, the coordinator's log. ``no copies``: the same with ``snapshot.partners: 0``. All three
live all the time and take turns: the trainers of the others are stopped (SIGSTOP) meanwhile, so that other work on the
machine falls on all of them. A step is the time between the ends of two steps; ``added`` is the median over the rounds
of the difference to the engine's median step in the same round. Loopback and shared cores: not to be set against a
cluster's figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.load import load_job
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare
from elastic_train.data.sources import open_training
from elastic_train.training.engine import Engine
from tests.local_job import LocalJob

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = Layout(pp=2, dp_shard=2)
NODES = "aabb"
WARM_UP = 5
"""Steps before the first turn."""


class Contestant:
    """Ranks that step whenever they are not stopped, and the file in which each step is a line that says when it ended.

    Args:
        pids: of the ranks.
        log: that file.
    """

    def __init__(self, pids: list[int], log: Path) -> None:
        self._pids, self._log = pids, log
        self.rounds: list[list[float]] = []
        """seconds per step"""

    def signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def take_turn(self, seconds: float) -> None:
        """Alone for so long."""
        begin = time.time()
        self.signal(signal.SIGCONT)
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        ends = [at for at in self._ends() if begin < at < begin + seconds]
        self.rounds.append([after - before for before, after in itertools.pairwise(ends)])

    def _ends(self) -> list[float]:
        return [json.loads(line)["time"] for line in self._log.read_text().splitlines() if line.endswith("}")]

    def await_steps(self, count: int) -> None:
        while not self._log.exists() or len(self._ends()) < count:
            time.sleep(0.1)

    def medians(self) -> list[float]:
        """By round."""
        return [statistics.median(steps) for steps in self.rounds]


def job_of(folder: Path, name: str, *overrides: str) -> Job:
    common = [f"name={name}", f"storage.uri={folder}", f"data.uri={folder / 'data'}", "tracking.enabled=false"]
    common += ["training.steps=100000", "checkpoint.every_steps=100000", "hosts.min=4", "hosts.settle_seconds=0"]
    common += ["failure.hang_seconds=100000", "failure.straggler=off", "parallel.pp=2", "parallel.dp_shard=2"]
    return load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", [*common, *overrides])


@contextmanager
def engine_alone(job: Job, folder: Path) -> Iterator[Contestant]:
    """Forked, so before anything else has begun a thread."""
    pids = [_fork(partial(_step_for_ever, job, rank, folder)) for rank in range(LAYOUT.world_size)]
    try:
        yield Contestant(pids, folder / "engine.jsonl")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    finally:
        os._exit(1)


def _step_for_ever(job: Job, rank: int, folder: Path) -> None:
    parent = os.getppid()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", LAYOUT.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=LAYOUT.world_size)
    engine = Engine(job, LAYOUT, rank, open_training(job).batches)
    engine.initialize()
    for step in range(1, job.training.steps + 1):
        engine.train_step(step)
        if os.getppid() != parent:
            return
        if rank == 0:
            with (folder / "engine.jsonl").open("a") as log:
                log.write(json.dumps({"time": time.time()}) + "\n")


@contextmanager
def whole_job(job: Job, folder: Path) -> Iterator[Contestant]:
    with LocalJob(job) as run:
        run.start_hosts(NODES)
        run.wait_step(WARM_UP)
        contestant = Contestant(run.trainer_pids(), folder / job.name / "steps.jsonl")
        yield contestant
        contestant.signal(signal.SIGCONT)
        run.stop()
        run.finish()


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Contestant]:
    jobs = {"no copies": job_of(folder, "alone", "snapshot.partners=0"), "job": job_of(folder, "partners")}
    prepare(open_corpus("python-stdlib"), jobs["job"].data.uri, jobs["job"].model.vocab_size)
    with ExitStack() as stack:
        contestants = {"engine": stack.enter_context(engine_alone(jobs["job"], folder))}
        contestants["engine"].await_steps(WARM_UP)
        contestants["engine"].signal(signal.SIGSTOP)
        for name, job in jobs.items():
            contestants[name] = stack.enter_context(whole_job(job, folder))
            contestants[name].signal(signal.SIGSTOP)
        for number in range(rounds):
            for contestant in contestants.values():
                contestant.take_turn(seconds)
            steps = ", ".join(f"{name} {one.medians()[-1]:.3f} s" for name, one in contestants.items())
            print(f"round {number + 1}: {steps}", flush=True)
    return contestants


def table(contestants: dict[str, Contestant]) -> str:
    """In ms, and % of the engine's step."""
    rows = ["| | step, median ms | p95 | added, median ms | min | max | added, % | steps |", "|---" * 8 + "|"]
    alone = contestants["engine"].medians()
    for name, one in contestants.items():
        steps = [step * 1e3 for steps in one.rounds for step in steps]
        added = [(mine - base) * 1e3 for mine, base in zip(one.medians(), alone, strict=True)]
        share = statistics.median(100 * (mine / base - 1) for mine, base in zip(one.medians(), alone, strict=True))
        rows.append(
            f"| {name} | {statistics.median(steps):.1f} | {statistics.quantiles(steps, n=20)[-1]:.1f} "
            f"| {statistics.median(added):.1f} | {min(added):.1f} | {max(added):.1f} | {share:.1f} | {len(steps)} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a turn; some ten steps at least")
    parser.add_argument("--json", type=Path, help="write every single step here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contestants = measure(Path(folder), arguments.rounds, arguments.seconds)
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(table(contestants))
    if arguments.json:
        arguments.json.write_text(json.dumps({name: one.rounds for name, one in contestants.items()}, indent=1))


if __name__ == "__main__":
    main()
