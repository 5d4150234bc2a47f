"""What gloo's collectives reach of the bandwidth that an all-reduce reaches.

    python -m benchmarks.collectives [--ranks 2 4 8] [--megabytes 5 20] [--rounds 15]

A ring all-reduce sends twice what a reduce-scatter or an all-gather of the same tensor sends, so these should take half
its time. ``share``: half the time of the all-reduce over their own; ``elastic_train.planner`` divides by it
(``Accelerator.collective_shares``). Ranks are forked, one thread each, loopback; medians over the rounds, in which the
collectives take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.forked import Prepare, Work, cpu_seconds, measure

SENT = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0}
"""What a ring sends, in payloads times (N - 1) / N."""


def _prepare(rank: int, ranks: int, folder: str, megabytes: float, rounds: int) -> Prepare:
    import torch
    import torch.distributed as dist

    def prepare() -> Work:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
        part = int(megabytes * 1e6) // 4 // ranks
        whole, shard, gathered = torch.randn(part * ranks), torch.empty(part), torch.empty(part * ranks)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(gathered, shard),
        }

        def work() -> dict[str, tuple[float, float]]:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    dist.barrier()
                    began, cpu = time.perf_counter(), cpu_seconds()
                    call()
                    found[name].append((time.perf_counter() - began, cpu_seconds() - cpu))
            return {name: _medians(each) for name, each in found.items()}

        return work

    return prepare


def _medians(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Of seconds and CPU seconds; without the first round, which makes the connections."""
    seconds, cpu = zip(*found[1:], strict=True)
    return statistics.median(seconds), statistics.fmean(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[5, 20])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print("| ranks | MB | collective | ms | CPU ms of a rank | share | share by CPU |\n|---|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        for megabytes in arguments.megabytes:
            with tempfile.TemporaryDirectory() as folder:
                every = [_prepare(rank, ranks, folder, megabytes, arguments.rounds) for rank in range(ranks)]
                results = measure(every).results
            found = {name: [statistics.fmean(each[name][i] for each in results) for i in (0, 1)] for name in SENT}
            for name, (seconds, cpu) in found.items():
                shares = [found["all_reduce"][i] / 2 / found[name][i] * SENT[name] for i in (0, 1)]
                print(
                    f"| {ranks} | {megabytes:g} | {name} | {seconds * 1e3:.1f} | {cpu * 1e3:.1f} "
                    f"| {shares[0]:.2f} | {shares[1]:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
