"""What ``determinism: exact`` costs: tokens per second and CPU seconds per step beside the default mode's.

    python benchmarks/determinism.py [--rounds 9] [--json results.json]

The quickstart's model (5.05 M parameters) on 8 slots of 256 tokens, fp32, gloo ranks with one thread each. Every
process holds an engine of either mode and steps with them in turn, so that other work on the machine falls on both;
figures are medians over the rounds. Loopback and shared cores: not to be set against a cluster's figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.load import load_job
from elastic_train.data.samples import Slot, padding
from elastic_train.parallel.exact import ExactGradients, FixedPointSum
from elastic_train.training import engine as engine_module
from elastic_train.training.engine import Engine
from elastic_train.training.optimizers.adam import LocalAdam

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = (
    Layout(),
    Layout(dp_shard=2),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(pp=2, dp_shard=2),
)
MODES = ("default", "exact")
WARM_UP = 2
PARTS: dict[str, tuple[Any, str]] = {
    "conversion": (FixedPointSum, "add"),
    "reduction": (ExactGradients, "sums"),
    "to float32": (engine_module, "from_fixed_point"),
    "norm": (Engine, "_reduce"),
    "optimizer": (LocalAdam, "step"),
}
"""What exact does instead of, or beside, what the default mode does."""
Measured = dict[str, list[float]]


class RandomTokens:
    """Slots that are a function of (step, slot)."""

    def __init__(self, job: Job) -> None:
        self._shape = job.training.micro_batch, job.data.sequence_length
        self._vocabulary = job.model.vocab_size

    def load(self, step: int, slots: range) -> list[Slot]:
        return [self.slot(step, index) for index in slots]

    def slot(self, step: int, index: int) -> Slot:
        rows, length = self._shape
        tokens = np.random.default_rng((step, index)).integers(0, self._vocabulary, (rows, length + 1))
        return Slot(tokens[:, :-1], tokens[:, 1:], np.zeros(self._shape, np.int64))

    def padding(self) -> Slot:
        return padding(*self._shape)


class Stopwatch:
    """Sums up the CPU seconds that one function takes in this process."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.process_time() - start

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def train(rank: int, layout: Layout, rounds: int) -> dict[str, Measured]:
    """Wall and CPU seconds of every step of both modes, and the CPU seconds of the parts."""
    watches = {name: Stopwatch(owner, function) for name, (owner, function) in PARTS.items()}
    engines = {}
    for mode in MODES:
        job = load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", [f"training.determinism={mode}"])
        engines[mode] = Engine(job, layout, rank, RandomTokens(job))
        engines[mode].initialize()
    results: dict[str, Measured] = {mode: {"wall": [], "cpu": [], **{name: [] for name in watches}} for mode in MODES}
    for step in range(1, rounds + WARM_UP + 1):
        for mode, engine in engines.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            engine.train_step(step)
            figures = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            figures |= {name: watch.take() for name, watch in watches.items()}
            for name, value in figures.items():
                results[mode][name] += [value] if step > WARM_UP else []
    return results


def run_layout(layout: Layout, rounds: int) -> list[dict[str, Measured]]:
    """Fork the ranks, and gather what each measured."""
    with tempfile.TemporaryDirectory() as folder:
        children = [
            _fork(rank, layout, folder, lambda rank: train(rank, layout, rounds)) for rank in range(layout.world_size)
        ]
        if sum(os.waitpid(pid, 0)[1] for pid in children):
            raise RuntimeError(f"a rank of {layout} failed")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(layout.world_size)]


def _fork(rank: int, layout: Layout, folder: str, function: Callable[[int], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", layout.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size)
        Path(folder, f"{rank}.json").write_text(json.dumps(function(rank)))
        dist.barrier()
        code = 0
    finally:
        os._exit(code)


def median(ranks: list[dict[str, Measured]], mode: str, name: str, over: Callable[[Any], float]) -> float:
    """Over the rounds, of what ``over`` makes of the figures of all ranks."""
    return statistics.median(over(values) for values in zip(*(rank[mode][name] for rank in ranks), strict=True))


def row(layout: Layout, ranks: list[dict[str, Measured]], tokens: int) -> str:
    """Wall: the slowest rank's; CPU: of all ranks together."""
    rates = [tokens / median(ranks, mode, "wall", max) for mode in MODES]
    cpu = [median(ranks, mode, "cpu", sum) for mode in MODES]
    figures = [f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0]:.2f}"]
    figures += [f"{cpu[0]:.2f}", f"{cpu[1]:.2f}", f"{cpu[1] / cpu[0]:.2f}"]
    return f"| {layout} | " + " | ".join(figures) + " |"


def parts_row(layout: Layout, ranks: list[dict[str, Measured]]) -> str:
    """How much more CPU milliseconds exact takes, of all ranks together: in all, by part, and outside of the parts."""
    more = {
        name: 1e3 * (median(ranks, "exact", name, sum) - median(ranks, "default", name, sum))
        for name in ("cpu", *PARTS)
    }
    more["rest"] = 2 * more["cpu"] - sum(more.values())
    return f"| {layout} | " + " | ".join(f"{value:.0f}" for value in more.values()) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every single measurement here")
    arguments = parser.parse_args()
    job = load_job(ROOT / "jobs" / "configs" / "quickstart.yaml", [])
    results = {str(layout): run_layout(layout, arguments.rounds) for layout in LAYOUTS}
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print("| layout | tokens/s, default | exact | ratio | CPU s per step, default | exact | ratio |")
    print("|---|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        print(row(layout, results[str(layout)], job.training.global_batch * job.data.sequence_length))
    print(f"\n| layout | more CPU ms per step | {' | '.join(PARTS)} | rest |")
    print("|---|---|" + "---|" * (len(PARTS) + 1))
    for layout in LAYOUTS:
        print(parts_row(layout, results[str(layout)]))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
