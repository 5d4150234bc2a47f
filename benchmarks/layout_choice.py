"""How good the layout is that the planner chooses: every mesh of up to 8 CPU ranks of the quickstart model, run.

Every size of tp, pp, cp and of the data axis, each with the options that the planner holds for its fastest, and the
chosen mesh with all its ways to share state. The planner knows the machine from one run (``zero3`` over 8 ranks), as
``--calibrate`` would. The figure is what the chosen one loses against the fastest. Ranks are forked, one thread each,
gloo on loopback, random tokens; the rows take turns, and medians of the rounds count. CPU seconds tell what a machine
that others use hides. 48 layouts and 3 rounds of 4 steps take some 11 minutes on 2 cores.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.forked import Prepare, Work, measure
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.load import load_job
from elastic_train.data.samples import Slot, padding
from elastic_train.planner.calibration import FEWEST, WARM_UP, calibrate
from elastic_train.planner.constraints import violated
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.held import Held
from elastic_train.planner.memory import fullest_rank
from elastic_train.planner.search import rank_layouts
from elastic_train.planner.search_options import SCHEDULES, Mesh, Schedule
from elastic_train.planner.search_space import space_of
from elastic_train.planner.step_time import step_time

QUICKSTART = Path(__file__).parents[1] / "jobs/configs/quickstart.yaml"
RANKS = 8
_DEFAULTS = {"reshard_after_forward": False, "pipeline": "1f1b", "virtual_stages": 2, "context": "gather"}


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
    """Something to run: a layout with its options, as ``Held.options`` has them, and its steps."""

    layout: Layout
    options: dict[str, Any]
    steps: list[Step] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.layout} {', '.join(f'{name}={value}' for name, value in self.options.items())}"

    @property
    def seconds(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def cpu(self) -> float:
        return statistics.median(step.cpu for step in self.steps)

    def job(self, job: Job) -> Job:
        """``job`` with the options."""
        given = _DEFAULTS | self.options
        training = {name: given.pop(name) for name in ("micro_batch", "recompute")}
        sections = {
            "parallel": job.parallel.model_copy(update=self.layout.as_dict() | given),
            "training": job.training.model_copy(update=training),
        }
        return job.model_copy(update=sections)


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and CPU seconds of all ranks together."""

    seconds: float
    cpu: float


@dataclass(frozen=True)
class Measured:
    """``calibration``: seconds of a step in the layout by which the planner knows the machine."""

    machine: str
    calibration: float
    rows: list[Row]


def measured_step(job: Job, layout: Layout, steps: int) -> Step:
    """The mean of ``steps`` steps of all ranks, forked for it, after ``WARM_UP`` others."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure([_prepare(job, layout, rank, folder, steps) for rank in range(layout.world_size)])
        return Step(found.seconds / steps, sum(found.cpu) / steps)


def _prepare(job: Job, layout: Layout, rank: int, folder: str, steps: int) -> Prepare:
    # Imported before the ranks are forked: `search` needs no torch.
    import torch
    import torch.distributed as dist

    from elastic_train.training.engine import Engine

    def prepare() -> Work:
        torch.set_num_threads(1)
        world = layout.world_size
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
        engine = Engine(job, layout, rank, RandomTokens(job))
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


def _calibration_question(job: Job) -> tuple[Job, Layout]:
    space, mesh = space_of(job, RANKS), Mesh(1, 1, 1, RANKS)
    sharing = next(each for each in space.sharings(mesh) if (each.data, each.reshard_after_forward) == ("zero3", False))
    return space.question(mesh, sharing, SCHEDULES[0], 1, "none")


def known_by(job: Job, seconds: float) -> Accelerator:
    """The machine as one run of ``zero3`` over all ranks tells it."""
    own, layout = _calibration_question(job)
    lines = [{"generation": 1, "layout": str(layout), "seconds": seconds} for _ in range(WARM_UP + FEWEST)]
    return calibrate(own, lines, [], accelerator("cpu")).accelerator


def rows_of(job: Job, chip: Accelerator) -> list[Row]:
    """The chosen one first, then its other ways to share state, then every other mesh."""
    first, space = rank_layouts(job, RANKS, chip).best[0], space_of(job, RANKS)
    chosen = _mesh(first.layout)
    training, parallel = first.job.training, first.job.parallel
    schedule = Schedule(parallel.pipeline, parallel.virtual_stages, parallel.context)
    found = [_row(first.job, first.layout)]
    for sharing in space.sharings(chosen):
        found.append(_row(*space.question(chosen, sharing, schedule, training.micro_batch, training.recompute)))
    meshes = (replace(widest, data_ranks=n) for widest in space.widest(RANKS) for n in range(1, widest.data_ranks + 1))
    for mesh in meshes:
        asked = [question for question in _questions(job, mesh) if violated(*question) is None]
        if asked and mesh != chosen:
            found.append(_row(*min(asked, key=lambda question: step_time(*question, chip).total)))
    return [row for at, row in enumerate(found) if row not in found[:at]]


def _mesh(layout: Layout) -> Mesh:
    return Mesh(layout.tp, layout.pp, layout.cp, layout.data_ranks)


def _questions(job: Job, mesh: Mesh) -> Iterator[tuple[Job, Layout]]:
    space = space_of(job, RANKS)
    for sharing, way, recompute in itertools.product(space.sharings(mesh), space.ways(mesh), space.recomputes()):
        yield space.question(mesh, sharing, *way, recompute)


def _row(job: Job, layout: Layout) -> Row:
    return Row(layout, Held(job, layout, fullest_rank(job, layout)).options)


def measured(rounds: int, steps: int, only: int | None) -> Measured:
    """Run them."""
    job, began = quickstart_job(), time.perf_counter()
    seconds = measured_step(*_calibration_question(job), steps).seconds
    rows = rows_of(job, known_by(job, seconds))[:only]
    for number in range(rounds):
        for row in rows:
            row.steps.append(measured_step(row.job(job), row.layout, steps))
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - began:.0f} s", flush=True)
    return Measured(f"{platform.machine()}, {os.cpu_count()} cores", seconds, rows)


def write(found: Measured, out: Path) -> None:
    rows = [
        {
            "layout": row.layout.as_dict(),
            "options": row.options,
            "steps": [[step.seconds, step.cpu] for step in row.steps],
        }
        for row in found.rows
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(
        f'{{"machine": {json.dumps(found.machine)}, "calibration": {found.calibration}, "rows": [\n{lines}\n]}}\n'
    )


def read(path: Path) -> Measured:
    found = json.loads(path.read_text())
    rows = [
        Row(Layout(**row["layout"]), row["options"], [Step(*step) for step in row["steps"]]) for row in found["rows"]
    ]
    return Measured(found["machine"], found["calibration"], rows)


@dataclass(frozen=True)
class Verdict:
    """``loss``: of the layout chosen against the fastest, a share; None: it was not measured."""

    chosen: Row
    loss: float | None
    best: Row
    predicted: dict[str, float]
    """name of a row -> seconds"""


def verdict(found: Measured) -> Verdict:
    """What the planner, as it is now, makes of it."""
    job = quickstart_job()
    chip = known_by(job, found.calibration)
    first = rank_layouts(job, RANKS, chip).best[0]
    chosen = _row(first.job, first.layout)
    best = min(found.rows, key=lambda row: row.seconds)
    predicted = {row.name: step_time(row.job(job), row.layout, chip).total for row in found.rows}
    seconds = next((row.seconds for row in found.rows if row.name == chosen.name), None)
    return Verdict(chosen, None if seconds is None else seconds / best.seconds - 1, best, predicted)


def table(found: Measured, fastest: int | None = None) -> list[str]:
    """Lines of a table; of many only the ``fastest`` ones and the slowest."""
    said, rows = verdict(found), sorted(found.rows, key=lambda row: row.seconds)
    lines = ["| layout | measured s | CPU s of all ranks | predicted s |", "|---|---|---|---|"]
    for row in rows if fastest is None else [*rows[:fastest], rows[-1]]:
        mark = " **chosen**" if row.name == said.chosen.name else ""
        lines.append(f"| {row.name}{mark} | {row.seconds:.3f} | {row.cpu:.3f} | {said.predicted[row.name]:.3f} |")
    return lines


def summary(found: Measured) -> list[str]:
    """Lines of a table with the verdict, and how near predictions are to what was measured, less the median ratio."""
    said = verdict(found)
    ratios = [said.predicted[row.name] / row.seconds for row in found.rows]
    middle = statistics.median(ratios)
    off = sorted(abs(ratio / middle - 1) for ratio in ratios)
    loss = "not measured" if said.loss is None else f"{100 * said.loss:.1f} % slower"
    return [
        "| chosen, against the fastest | layouts | predicted / measured | half of them within | all within |",
        "|---|---|---|---|---|",
        f"| {loss} | {len(ratios)} | {middle:.2f} | {statistics.median(off):.0%} | {off[-1]:.0%} |",
    ]


def judge(found: Measured) -> int:
    """Print the tables; 1: what is chosen was not measured."""
    print(f"{found.machine}; known by {found.calibration:.3f} s a step of zero3 over {RANKS} ranks")
    print("\n".join([*table(found), "", *summary(found)]))
    said = verdict(found)
    if said.loss is None:
        print(f"\nchosen, but not measured: {said.chosen.name}; run choice again")
        return 1
    return 0
