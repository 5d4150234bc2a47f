"""Tokens per second, CPU seconds and memory of every strategy, beside plain DDP and FSDP2 by hand.

    python benchmarks/strategies.py [--rounds 3] [--json results.json]

9.3 M-parameter Llama (d 256, 6 layers, 8 heads, vocabulary 8192), 8 sequences of 256 tokens per step, fp32, gloo ranks
with one thread each, forked from one process. The rows take turns, so that other work on the machine falls on all of
them; the figure is the median of the rounds. Loopback and shared cores: not to be set against a cluster's figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.batches import slots_of
from elastic_train.data.samples import Slot, padding
from elastic_train.model.transformer import Transformer
from elastic_train.training.engine import Engine

MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 768,
    "vocab_size": 8192,
}
TOKENS, BATCH = 256, 8
WARM_UP, STEPS = 2, 4
Step = Callable[[int], float]
"""Runs a step and returns its loss."""


class RandomTokens:
    """Slots of ``size`` samples that are a function of (step, slot)."""

    def __init__(self, size: int) -> None:
        self._size = size

    def load(self, step: int, slots: range) -> list[Slot]:
        return [self.slot(step, index) for index in slots]

    def slot(self, step: int, index: int) -> Slot:
        tokens = np.random.default_rng((step, index)).integers(0, MODEL["vocab_size"], (self._size, TOKENS + 1))
        return Slot(tokens[:, :-1], tokens[:, 1:], np.zeros((self._size, TOKENS), np.int64))

    def padding(self) -> Slot:
        return padding(self._size, TOKENS)


def job_of(parallel: dict[str, Any], training: dict[str, Any]) -> Job:
    return Job.model_validate(
        {
            "name": "strategies",
            "model": MODEL,
            "data": {"uri": "memory", "sequence_length": TOKENS},
            "training": {"steps": 100, "global_batch": BATCH} | training,
            "parallel": parallel,
        }
    )


def ours(rank: int, layout: Layout, parallel: dict[str, Any], training: dict[str, Any]) -> Step:
    job = job_of(parallel, training)
    engine = Engine(job, layout, rank, RandomTokens(job.training.micro_batch))
    engine.initialize()
    return lambda step: engine.train_step(step).loss


def by_hand(rank: int, layout: Layout, kind: str) -> Step:
    """What a careful user writes without us: torch's DDP or FSDP2, torch's fused AdamW, gradients summed by slots."""
    model: Any = Transformer(job_of({}, {}).model).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if kind == "FSDP2 by hand":
        for block in model.blocks.values():
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
    elif layout.data_ranks > 1:
        model = DistributedDataParallel(model)
    by_tensor = kind == "FSDP2 by hand"  # the fused kernel takes no DTensor on CPU here
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=not by_tensor, foreach=by_tensor)
    slots = slots_of(rank, layout.data_ranks, BATCH)

    def step(number: int) -> float:
        optimizer.zero_grad()
        samples = [RandomTokens(1).slot(number, slot) for slot in slots]
        ids, labels, _ = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*samples, strict=True))
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


ROWS: dict[str, tuple[Layout, Callable[[int, Layout], Step]]] = {
    "plain torch": (Layout(), lambda rank, layout: by_hand(rank, layout, "plain")),
    "DDP by hand": (Layout(dp_replicate=4), lambda rank, layout: by_hand(rank, layout, "DDP by hand")),
    "FSDP2 by hand": (Layout(dp_shard=4), lambda rank, layout: by_hand(rank, layout, "FSDP2 by hand")),
}


def add(name: str, layout: Layout, training: dict[str, Any] | None = None, **parallel: Any) -> None:
    ROWS[name] = layout, lambda rank, layout: ours(rank, layout, parallel, training or {})


add("one rank", Layout())
add("one rank, micro_batch 8", Layout(), {"micro_batch": 8})
add("ddp", Layout(dp_replicate=4), {"micro_batch": 2}, data="ddp")
add("zero1", Layout(dp_shard=4), {"micro_batch": 2}, data="zero1")
add("zero2", Layout(dp_shard=4), {"micro_batch": 2}, data="zero2")
add("zero3", Layout(dp_shard=4), {"micro_batch": 2}, data="zero3")
add("zero3, resharded", Layout(dp_shard=4), {"micro_batch": 2}, data="zero3", reshard_after_forward=True)
add("hsdp 2 x 2", Layout(dp_replicate=2, dp_shard=2), {"micro_batch": 2}, data="hsdp")
add("tp 2", Layout(tp=2))
add("tp 2 x zero3 2", Layout(dp_shard=2, tp=2))
add("pp 2, gpipe", Layout(pp=2), pipeline="gpipe")
add("pp 2, 1f1b", Layout(pp=2), pipeline="1f1b")
add("pp 2, interleaved 1f1b", Layout(pp=2), pipeline="interleaved_1f1b")
add("pp 2, zero bubble", Layout(pp=2), pipeline="zero_bubble")
add("pp 2 x zero3 2", Layout(pp=2, dp_shard=2))
add("cp 2, gather", Layout(cp=2), context="gather")
add("cp 2, ulysses", Layout(cp=2), context="ulysses")
add("one rank, recompute full", Layout(), {"recompute": "full"})
add("one rank, recompute selective", Layout(), {"recompute": "selective"})
add("one rank, bf16", Layout(), {"precision": "bf16"})


def measure(name: str) -> dict[str, float]:
    """Fork the ranks of a row, run it, gather what they measured."""
    layout, build = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(layout.world_size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    Path(folder, f"{rank}.json").write_text(json.dumps(_run(rank, layout, build, folder)))
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in children):
            raise RuntimeError(f"a rank of {name!r} failed")
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(layout.world_size)]
    return {
        "tokens_per_second": BATCH * TOKENS / max(result["seconds"] for result in results),
        "cpu_seconds": sum(result["cpu"] for result in results),
        "peak_mib": max(result["peak"] for result in results),
    }


def _run(rank: int, layout: Layout, build: Callable[[int, Layout], Step], folder: str) -> dict[str, float]:
    torch.set_num_threads(1)
    before = _resident_mib("VmRSS")
    store = dist.FileStore(f"{folder}/store", layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size)
    step = build(rank, layout)
    for number in range(1, WARM_UP + 1):
        step(number)
    dist.barrier()
    started, cpu = time.perf_counter(), _cpu_seconds()
    for number in range(WARM_UP + 1, WARM_UP + STEPS + 1):
        step(number)
    seconds, used = (time.perf_counter() - started) / STEPS, (_cpu_seconds() - cpu) / STEPS
    return {"seconds": seconds, "cpu": used, "peak": _resident_mib("VmHWM") - before}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.only or list(ROWS)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            results[name].append(measure(name))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{machine}, median of {arguments.rounds} rounds\n")
    print("| row | ranks | tokens/s | CPU s / step | peak MiB / rank |\n|---|---|---|---|---|")
    for name, rounds in results.items():
        tokens, cpu, peak = (
            statistics.median(each[key] for each in rounds) for key in ("tokens_per_second", "cpu_seconds", "peak_mib")
        )
        print(f"| {name} | {ROWS[name][0].world_size} | {tokens:,.0f} | {cpu:.2f} | {peak:.0f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
