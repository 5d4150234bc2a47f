"""How fast checkpoints are saved and loaded, what they cost a step and how much memory, beside pyarrow and torch's.

    python -m benchmarks.checkpoints [--quick] [--rounds 3] [--json results.json]

The state is that of a model of ten layers with Adam's two moments (270 tensors, fp32), its rows dealt out to the ranks.
Ranks are forked processes that begin together, as hosts do. The rows of a table take turns, so that other work on the
machine falls on all of them; figures are medians of the rounds, ratios medians of each round's ratio. S3 is a real
server on the same cores, over loopback: not to be set against a cluster's figures. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint_work as work
from benchmarks.checkpoint_work import Run
from benchmarks.forked import Measured, measure
from tests.s3_server import S3Server, running_s3_server

MB = 10**6
Row = dict[str, Any]
Maker = Callable[[Run], Callable[[], Any]]

S3_ROWS: dict[str, Maker] = {
    "save": work.upload,
    "pyarrow PUT": work.pyarrow_put,
    "load": work.load,
    "pyarrow GET": work.pyarrow_get,
}
LOCAL_ROWS: dict[str, Maker] = {
    "ours": work.snapshot_and_upload,
    "torch.save": work.torch_save,
    "dcp.save": work.dcp_save,
    "dcp.async_save": work.dcp_async_save,
    "ours, load": work.load,
    "torch.load": work.torch_load,
    "dcp.load": work.dcp_load,
}
STALL_ROWS: dict[str, Maker] = {"snapshot": work.snapshots, "dcp.async_save": work.dcp_async_saves}


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of the whole state, the ranks that share it, and how often it is measured."""

    nbytes: int
    ranks: int
    rounds: int


def run_row(name: str, maker: Maker, run: Run, ranks: int, server: S3Server | None) -> Row:
    """One measurement; a save of ours ends with the commit of its manifest by a further process."""
    before = _server_cpu(server)
    run = replace(run, group=f"{name}-{run.step}")
    measured = measure([lambda rank=rank: maker(replace(run, rank=rank)) for rank in range(ranks)])
    seconds, cpu = measured.seconds, sum(measured.cpu)
    if maker in (work.upload, work.snapshot_and_upload):
        committed = measure([lambda: work.commit(run, [result["uploaded"] for result in measured.results])])
        seconds, cpu = seconds + committed.seconds, cpu + sum(committed.cpu)
    return {
        "row": name,
        "mb": run.nbytes / MB,
        "ranks": ranks,
        "seconds": seconds,
        "cpu": cpu,
        "server_cpu": _server_cpu(server) - before,
        "peak_mib": max(measured.peak_mib),
        "blocked": _blocked(measured),
    }


def _blocked(measured: Measured) -> list[float]:
    """Seconds that the slowest rank's training thread waited, for each save of the row."""
    each = [result["blocked"] for result in measured.results if isinstance(result, dict) and "blocked" in result]
    return [max(at) for at in zip(*each, strict=True)]


def _server_cpu(server: S3Server | None) -> float:
    if server is None:
        return 0.0
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_table(rows: dict[str, Maker], sizes: Sequence[Size], on_s3: bool) -> list[Row]:
    """All rounds of all rows at all sizes; a round before them is not counted, below a gigabyte."""
    found: list[Row] = []
    step = 0
    with _place(on_s3) as (run, server):
        for size in sizes:
            warm_up = int(size.nbytes < 1000 * MB)
            for number in range(size.rounds + warm_up):
                step += 1
                for name, maker in rows.items():
                    each = replace(run, nbytes=size.nbytes, ranks=size.ranks, step=step)
                    row = run_row(name, maker, each, size.ranks, server)
                    print(f"{row['mb']:.0f} MB, {size.ranks} ranks, {name}: {row['seconds']:.3f} s", flush=True)
                    if number >= warm_up:
                        found.append(row)
    return found


@contextmanager
def _place(on_s3: bool) -> Iterator[tuple[Run, S3Server | None]]:
    """An empty place for a job, and one in shared memory for images."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as images:
        run = Run(nbytes=0, ranks=1, rank=0, step=1, folder=Path(folder), images=Path(images))
        if not on_s3:
            yield run, None
            return
        with running_s3_server(memory="2GiB") as server:  # with less, collecting garbage is most of what it does
            os.environ.update(server.environment)
            yield replace(run, bucket=server.create_bucket("bench"), endpoint_url=server.endpoint_url), server


def _median(rows: Sequence[Row], name: str, field: str) -> float:
    return statistics.median(row[field] for row in rows if row["row"] == name)


def _ratio(rows: Sequence[Row], above: str, below: str) -> float:
    """Median of the rounds' ratios of seconds, row ``above`` over row ``below``."""
    pairs = ([row["seconds"] for row in rows if row["row"] == name] for name in (above, below))
    return statistics.median(a / b for a, b in zip(*pairs, strict=True))


def _sizes(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[float, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["mb"], row["ranks"]), []).append(row)
    return list(groups.values())


def s3_table(rows: Sequence[Row]) -> str:
    lines = [
        "| MB | ranks | save MB/s | of pyarrow PUT | load MB/s | of pyarrow GET | CPU s: save | PUT | load | GET "
        "| server CPU s: save | PUT | peak MiB: save | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group in _sizes(rows):
        mb, cells = group[0]["mb"], [f"{group[0]['mb']:.0f}", str(group[0]["ranks"])]
        for ours, plain in (("save", "pyarrow PUT"), ("load", "pyarrow GET")):
            cells += [f"{mb / _median(group, ours, 'seconds'):.0f}", f"{_ratio(group, plain, ours):.2f}"]
        cells += [f"{_median(group, name, 'cpu'):.2f}" for name in S3_ROWS]
        cells += [f"{_median(group, name, 'server_cpu'):.2f}" for name in ("save", "pyarrow PUT")]
        cells += [f"{_median(group, name, 'peak_mib'):.0f}" for name in ("save", "load")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def local_table(rows: Sequence[Row]) -> str:
    lines = [
        "| MB | ranks | row | seconds | of ours | CPU s | blocked s | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in _sizes(rows):
        for name in LOCAL_ROWS:
            ours = "ours, load" if "load" in name else "ours"
            waits = [row["blocked"][0] for row in group if row["row"] == name and row["blocked"]]
            seconds = _median(group, name, "seconds")
            blocked = f"{statistics.median(waits):.3f}" if waits else "" if "load" in name else f"{seconds:.3f}"
            ratio = _ratio(group, name, ours)
            lines.append(
                f"| {group[0]['mb']:.0f} | {group[0]['ranks']} | {name} | {seconds:.3f} | {ratio:.2f} "
                f"| {_median(group, name, 'cpu'):.2f} | {blocked} | {_median(group, name, 'peak_mib'):.0f} |"
            )
    return "\n".join(lines)


def stall_table(rows: Sequence[Row]) -> str:
    lines = [
        "| MB | snapshot ms | dcp.async_save, first ms | later ms | later / snapshot |",
        "|---|---|---|---|---|",
    ]
    for group in _sizes(rows):
        ours, first, later = (
            statistics.median(wait for row in group if row["row"] == name for wait in row["blocked"][part])
            for name, part in (
                ("snapshot", slice(None)),
                ("dcp.async_save", slice(1)),
                ("dcp.async_save", slice(1, None)),
            )
        )
        lines.append(
            f"| {group[0]['mb']:.0f} | {1e3 * ours:.1f} | {1e3 * first:.1f} | {1e3 * later:.1f} | {later / ours:.1f} |"
        )
    return "\n".join(lines)


def sizes_of(arguments: argparse.Namespace) -> list[Size]:
    """Bytes on one rank, then ranks at one size, then the largest once."""
    if arguments.quick:
        return [Size(20 * MB, 1, 1), Size(20 * MB, 2, 1)]
    sizes = [Size(mb * MB, 1, arguments.rounds) for mb in arguments.megabytes]
    sizes += [Size(100 * MB, ranks, arguments.rounds) for ranks in arguments.ranks if ranks > 1]
    return sizes + ([Size(2000 * MB, 1, 1)] if arguments.large else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 MB once, on one rank and on two: does it run?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[10, 100, 500], help="on one rank")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8], help="at 100 MB")
    parser.add_argument("--large", action="store_true", help="also 2,000 MB once: takes 8 GB of memory")
    parser.add_argument("--json", type=Path, help="write every single measurement here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before the processes are forked, which must not find a pool of threads
    sizes = sizes_of(arguments)
    single = [size for size in sizes if size.ranks == 1]
    results = {}
    for name, rows, measured, on_s3, table in (
        ("s3", S3_ROWS, sizes, True, s3_table),
        ("local", LOCAL_ROWS, sizes, False, local_table),
        ("stall", STALL_ROWS, single, False, stall_table),
    ):
        results[name] = run_table(rows, measured, on_s3)
        cores = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"\n{cores}, torch {torch.__version__}\n\n{table(results[name])}\n", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
