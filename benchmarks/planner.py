"""How long the planner searches, and how good what it chooses is.

    python -m benchmarks.planner search
    python -m benchmarks.planner choice [--rounds 3] [--steps 4] [--only 4] [--json results.json]

``search``: CPU seconds of one search, best of three, each in a process that has everything imported and has searched
nothing before.

``choice``: every mesh of up to 8 CPU ranks of the quickstart model is run for real, with the options that the search
takes for it, and the chosen mesh with all its ways to share state. It knows the machine from one run (``zero3``
over 8 ranks), as ``--calibrate`` would. The figure is what the chosen one loses against the fastest. Ranks are forked,
one thread each, gloo on loopback, random tokens; the rows take turns, and medians of the rounds count. CPU seconds tell
what a machine that others use hides. 27 layouts and 3 rounds of 4 steps take some 8 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.forked import Prepare, Work, measure
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.load import load_job, parse_job
from elastic_train.data.samples import Slot, padding
from elastic_train.planner.calibration import FEWEST, WARM_UP, calibrate
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.search import Candidate, rank_layouts
from elastic_train.planner.search_options import SCHEDULES, Mesh, Schedule
from elastic_train.planner.search_space import space_of

QUICKSTART = Path(__file__).parents[1] / "jobs/configs/quickstart.yaml"
RANKS = 8
SEARCHES = (
    ("quickstart", 8, "cpu", "{hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4, "
     "intermediate_size: 704, vocab_size: 4096}", 256, 8),
    ("llama3-8b", 8, "h100-80gb", "{preset: llama3-8b}", 8192, 512),
    ("llama3-70b", 64, "h100-80gb", "{preset: llama3-70b}", 8192, 1024),
    ("llama3-405b", 1024, "h100-80gb", "{preset: llama3-405b}", 8192, 2048),
    ("llama3-405b", 16384, "h100-80gb", "{preset: llama3-405b}", 8192, 2048),
    ("llama3-405b", 16384, "h100-80gb", "{preset: llama3-405b}", 131072, 128),
)  # fmt: skip
"""Model, accelerators, their kind, model section, tokens per sequence, sequences per step."""


def search() -> None:
    print("| model | ranks | sequence | CPU s | combinations | first |\n|---|---|---|---|---|---|")
    for name, gpus, kind, model, length, batch in SEARCHES:
        device, precision = ("cpu", "fp32") if kind == "cpu" else ("cuda", "bf16")
        job = parse_job(
            f"name: search\nmodel: {model}\ndata: {{uri: data, sequence_length: {length}}}\n"
            f"training: {{steps: 1, global_batch: {batch}, precision: {precision}}}\nhosts: {{device: {device}}}\n"
        )
        found = []
        for _ in range(3):
            with multiprocessing.get_context("fork").Pool(1) as one:
                found.append(one.apply(_searched, (job, gpus, kind)))
        seconds, looked_at, first = min(found)
        print(f"| {name} | {gpus:,} | {length:,} | {seconds:.3f} | {looked_at:,} | {first} |")


def _searched(job: Job, gpus: int, kind: str) -> tuple[float, int, str]:
    """CPU seconds in a process that remembers no earlier search, combinations looked at, and the first layout."""
    before = time.process_time()
    ranking = rank_layouts(job, gpus, accelerator(kind))
    seconds = time.process_time() - before
    return seconds, ranking.looked_at, str(ranking.best[0].layout) if ranking.best else "none fits"


class RandomTokens:
    """Slots that are a function of (step, slot)."""

    def __init__(self, job: Job) -> None:
        self._size, self._tokens = job.training.micro_batch, job.data.sequence_length
        self._vocabulary = job.model.vocab_size

    def load(self, step: int, slots: range) -> list[Slot]:
        return [self.slot(step, index) for index in slots]

    def slot(self, step: int, index: int) -> Slot:
        tokens = np.random.default_rng((step, index)).integers(0, self._vocabulary, (self._size, self._tokens + 1))
        return Slot(tokens[:, :-1], tokens[:, 1:], np.zeros((self._size, self._tokens), np.int64))

    def padding(self) -> Slot:
        return padding(self._size, self._tokens)


@dataclass(frozen=True)
class Row:
    """Something to run: a layout and its options, which are in the job."""

    name: str
    job: Job
    layout: Layout


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and CPU seconds of all ranks together."""

    seconds: float
    cpu: float


def measured_step(row: Row, steps: int) -> Step:
    """The mean of ``steps`` steps of all ranks, forked for it, after ``WARM_UP`` others."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure([_prepare(row, rank, folder, steps) for rank in range(row.layout.world_size)])
        return Step(found.seconds / steps, sum(found.cpu) / steps)


def _prepare(row: Row, rank: int, folder: str, steps: int) -> Prepare:
    # Imported before the ranks are forked: `search` needs no torch.
    import torch
    import torch.distributed as dist

    from elastic_train.training.engine import Engine

    def prepare() -> Work:
        torch.set_num_threads(1)
        world = row.layout.world_size
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
        engine = Engine(row.job, row.layout, rank, RandomTokens(row.job))
        engine.initialize()
        for number in range(1, WARM_UP + 1):
            engine.train_step(number)
        dist.barrier()

        def work() -> None:
            for number in range(WARM_UP + 1, WARM_UP + steps + 1):
                engine.train_step(number)

        return work

    return prepare


def quickstart_job() -> Job:
    """The quickstart model with everything left to the planner."""
    job = load_job(QUICKSTART)
    values: dict[str, Any] = job.as_dict()
    for section, names in {"training": ("micro_batch", "recompute"), "data": ("uri", "sources", "phases")}.items():
        for name in names:
            values[section].pop(name, None)
    del values["parallel"]
    values["data"]["uri"] = "memory"
    return Job.model_validate(values, strict=False)


def calibrated(job: Job, steps: int) -> tuple[Accelerator, float]:
    """The machine as one run of ``zero3`` over all ranks tells it."""
    space = space_of(job, RANKS)
    mesh = Mesh(1, 1, 1, RANKS)
    sharing = next(each for each in space.sharings(mesh) if (each.data, each.reshard_after_forward) == ("zero3", False))
    own, layout = space.question(mesh, sharing, SCHEDULES[0], 1, "none")
    seconds = measured_step(Row("calibration", own, layout), steps).seconds
    lines = [{"generation": 1, "layout": str(layout), "seconds": seconds} for _ in range(WARM_UP + FEWEST)]
    return calibrate(own, lines, [], accelerator("cpu")).accelerator, seconds


def rows_of(job: Job, ranked: list[Candidate]) -> list[Row]:
    """Every mesh with its best options, the chosen one first; then the chosen one's other ways to share state."""
    rows = [Row(f"{plan.layout} {_options(plan)}", plan.job, plan.layout) for plan in ranked]
    first, space = ranked[0], space_of(job, RANKS)
    mesh = Mesh(first.layout.tp, first.layout.pp, first.layout.cp, first.layout.data_ranks)
    training, parallel = first.job.training, first.job.parallel
    schedule = Schedule(parallel.pipeline, parallel.virtual_stages, parallel.context)
    for sharing in space.sharings(mesh):
        own, layout = space.question(mesh, sharing, schedule, training.micro_batch, training.recompute)
        if (own.parallel, layout) != (first.job.parallel, first.layout):
            kind = f"{sharing.data}{' resharded' if sharing.reshard_after_forward else ''}"
            rows.append(Row(f"{layout} {kind} instead", own, layout))
    return rows


def _options(plan: Candidate) -> str:
    return ", ".join(f"{name}={value}" for name, value in plan.options.items())


def choice(rounds: int, steps: int, only: int | None, out: Path | None) -> None:
    job, began = quickstart_job(), time.perf_counter()
    chip, seconds = calibrated(job, steps)
    ranked = rank_layouts(job, RANKS, chip, shown=1000).best
    rows = rows_of(job, ranked)[:only]
    predicted = {f"{plan.layout} {_options(plan)}": plan.time.total for plan in ranked}
    found: dict[str, list[Step]] = {row.name: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            found[row.name].append(measured_step(row, steps))
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - began:.0f} s", flush=True)
    times = {name: statistics.median(step.seconds for step in each) for name, each in found.items()}
    cpu = {name: statistics.median(step.cpu for step in each) for name, each in found.items()}
    best, chosen = min(times, key=lambda name: times[name]), rows[0].name
    print(f"{platform.machine()}, {os.cpu_count()} cores; efficiency {chip.efficiency:.3g} from {seconds:.3f} s a step")
    print("| layout | measured s | CPU s of all ranks | predicted s |\n|---|---|---|---|")
    for name, value in sorted(times.items(), key=lambda item: item[1]):
        guess = f"{predicted[name]:.3f}" if name in predicted else ""
        print(f"| {name}{' **chosen**' if name == chosen else ''} | {value:.3f} | {cpu[name]:.3f} | {guess} |")
    print(f"\n{len(rows)} layouts; chosen: {times[chosen] / times[best] - 1:+.1%} of the measured best, {best}")
    if out:
        lines = {name: [[step.seconds, step.cpu] for step in each] for name, each in found.items()}
        out.write_text(json.dumps({"steps": lines, "predicted": predicted, "chosen": chosen}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "choice"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", type=int, help="the first so many layouts, for a trial")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "search":
        search()
    else:
        choice(arguments.rounds, arguments.steps, arguments.only, arguments.json)


if __name__ == "__main__":
    main()
