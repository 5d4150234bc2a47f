"""How long the planner searches and takes to start, and how good what it chooses is.

    python -m benchmarks.planner search
    python -m benchmarks.planner start [--repeats 5]
    python -m benchmarks.planner choice [--rounds 3] [--steps 4] [--only 4] [--json results.json]
    python -m benchmarks.planner choice --measured results.json

``search``: CPU seconds of one search, best of three, each in a process that has everything imported and has searched
nothing before.

``start``: CPU and wall seconds of whole commands in fresh processes, medians.

``choice``: ``benchmarks/layout_choice.py``. With ``--measured`` nothing is run: the planner as it is now is judged by
what an earlier run has measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from elastic_train.config.job import Job
from elastic_train.config.load import parse_job
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.search import rank_layouts

STARTS = (
    "plan --help",
    "plan --params 70e9 --ranks 64 --strategy zero3 --json",
    "plan --model llama3-70b --gpus 64 --gpu h100-80gb --seq 8192 --global-batch 1024",
    "simulate --like llama3 --runs 1",
)
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


def start(repeats: int) -> None:
    print("| command | CPU s | wall s |\n|---|---|---|")
    for command in STARTS:
        runs = [_started(command) for _ in range(repeats)]
        cpu, wall = (statistics.median(each) for each in zip(*runs, strict=True))
        print(f"| `elastic-train {command}` | {cpu:.2f} | {wall:.2f} |", flush=True)


def _started(command: str) -> tuple[float, float]:
    """CPU and wall seconds of a process of its own, from its start to its end."""
    words, begin = [sys.executable, "-m", "elastic_train.cli.main", *command.split()], time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"elastic-train {command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("search")
    commands.add_parser("start").add_argument("--repeats", type=int, default=5)
    one = commands.add_parser("choice")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--steps", type=int, default=4)
    one.add_argument("--only", type=int, help="the first so many layouts, for a trial")
    one.add_argument("--json", type=Path, help="where what was measured is kept")
    one.add_argument("--measured", type=Path, help="what was kept: nothing is run")
    arguments = parser.parse_args()
    if arguments.what == "search":
        search()
    elif arguments.what == "start":
        start(arguments.repeats)
    else:
        from benchmarks import layout_choice

        if arguments.measured:
            sys.exit(layout_choice.judge(layout_choice.read(arguments.measured)))
        found = layout_choice.measured(arguments.rounds, arguments.steps, arguments.only)
        if arguments.json:
            layout_choice.write(found, arguments.json)
        layout_choice.judge(found)


if __name__ == "__main__":
    main()
