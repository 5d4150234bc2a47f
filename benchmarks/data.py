"""What the data costs: samples per second, reading from S3 against a plain loop, a resume, opening many shards.

    python -m benchmarks.data [--json data.json]

``rate``: samples of the quickstart's shape, in the order of training, from local files. ``remote``: one epoch from a
local S3 server (SeaweedFS) with an empty cache, against loops of plain boto3 GETs of the same byte ranges, which throw
away what they get: one at a time, and as many as a data set has under way when it reads ahead.
``resume``: a new order over a billion samples, asked for the ids of one step at a random place. ``open``: data sets of
10 to 10,000 shards, opened and asked for a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil

from elastic_train.config.operation import StorageConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.data.batch_memory import THREADS
from elastic_train.data.batches import StepBatches
from elastic_train.data.cache import BatchCache
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.manifest import Manifest
from elastic_train.data.mixture import MixedOrder, Mixture
from elastic_train.data.order import SampleOrder
from elastic_train.data.record_batches import fetch_batch, is_right
from elastic_train.storage.store import Store
from tests.data.token_sets import make
from tests.s3_server import S3Server, running_s3_server

MODEL_TOKENS = 4000
"""Tokens per second of the quickstart's model on this machine."""
BATCH_TOKENS = 2**18
"""Of a batch, as ``data prepare`` makes them."""
PLAIN, PLAIN_THREADS = "plain ranged GETs", f"plain ranged GETs, {THREADS} at a time"
Figures = dict[str, Any]


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of ``work``."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def epoch(dataset: TokenDataset, batch: int, depth: int) -> None:
    """All whole steps of an epoch."""
    steps = len(dataset) // batch
    training = TrainingConfig(steps=steps, global_batch=batch)
    batches = StepBatches(dataset, SampleOrder(len(dataset), 1), training, depth)
    for step in range(1, steps + 1):
        batches.load(step, range(batches.slots))


def rate(folder: Path) -> Figures:
    """8 sequences of 256 tokens per step from 8 M tokens in local files, documents of 500; medians of three epochs."""
    ends = [*range(500, 2**22, 500), 2**22]
    make(str(folder), [2**22, 2**22], BATCH_TOKENS, ends=[ends, ends])
    figures: Figures = {}
    for packing in ("stream", "documents"):
        dataset = TokenDataset.open(str(folder), 256, None, folder / "cache", packing=packing, tails="keep")
        took = statistics.median(seconds(lambda made=dataset: epoch(made, 8, 0)) for _ in range(3))
        samples = len(dataset) / took
        figures[packing] = {
            "samples/s": round(samples),
            "tokens/s": round(samples * 256),
            "times the model": round(samples * 256 / MODEL_TOKENS),
        }
    return figures


@contextmanager
def credentials(server: S3Server) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(server.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def remote(folder: Path, rounds: int) -> Figures:
    """64 MB in 4 shards, sequences of 2,048 tokens; ratios are medians of the rounds' ratios."""
    took: dict[str, list[tuple[float, float, float]]] = {}
    with running_s3_server() as server, credentials(server):
        uri = f"s3://{server.create_bucket('data')}/set"
        storage = StorageConfig(endpoint_url=server.endpoint_url)
        store = Store.open(uri, storage)
        manifest, _ = make(store, [2**23] * 4, BATCH_TOKENS)
        ranges = [(shard.path, offset, size) for shard in manifest.shards for offset, size in shard.batches]
        Random(1).shuffle(ranges)
        for number in range(rounds):
            for name, work in _rows(uri, storage, store, manifest, ranges, server, folder / f"{number}").items():
                took.setdefault(name, []).append(_costs(work, server.pid))
    return _compared(took, sum(size for _, _, size in ranges) / 1e6)


def _rows(
    uri: str,
    storage: StorageConfig,
    store: Store,
    manifest: Manifest,
    ranges: list[tuple[str, int, int]],
    server: S3Server,
    folder: Path,
) -> dict[str, Callable[[], Any]]:
    """What is measured, in turn. All of it fetches the same ranges once, but for the second epochs."""
    client = server.client()

    def plain(at_a_time: int) -> None:
        with ThreadPoolExecutor(at_a_time) as pool:
            for _ in pool.map(lambda each: _get(client, *each), ranges):
                pass

    rows: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: [_get(client, *each) for each in ranges],
        PLAIN_THREADS: partial(plain, THREADS),
        "checked and kept in the cache": partial(_keep, store, manifest, BatchCache(folder / "kept")),
    }
    for depth in (0, 2, 8):
        for name in ("first epoch", "second epoch"):
            rows[f"{name}, {depth} steps ahead"] = partial(_open_and_read, uri, storage, folder / f"{depth}", depth)
    return rows


def _costs(work: Callable[[], Any], server: int) -> tuple[float, float, float]:
    """Seconds of ``work``, CPU seconds of this process, and of the server."""
    before, theirs = time.process_time(), _cpu_seconds(server)
    took = seconds(work)
    return took, time.process_time() - before, _cpu_seconds(server) - theirs


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _compared(took: dict[str, list[tuple[float, float, float]]], megabytes: float) -> Figures:
    def ratio(name: str, plain: str) -> float:
        return round(statistics.median(p[0] / t[0] for p, t in zip(took[plain], took[name], strict=True)), 2)

    return {
        name: {
            "MB/s": round(megabytes / statistics.median(each[0] for each in times), 1),
            "CPU s": round(statistics.median(each[1] for each in times), 2),
            "server CPU s": round(statistics.median(each[2] for each in times), 2),
            "of plain": ratio(name, PLAIN),
            f"of plain, {THREADS} at a time": ratio(name, PLAIN_THREADS),
        }
        for name, times in took.items()
    }


def _keep(store: Store, manifest: Manifest, cache: BatchCache) -> None:
    """As a data set fetches its batches, in order."""
    for shard in manifest.shards:
        for number in range(len(shard.batches)):
            fetch, check = partial(fetch_batch, store, shard, number), partial(is_right, shard, number)
            cache.get(f"{shard.sha256}-{number}", fetch, check)


def _open_and_read(uri: str, storage: StorageConfig, cache: Path, depth: int) -> None:
    """As a job reads that masks no documents, which is the default."""
    epoch(TokenDataset.open(uri, 2048, storage, cache, numbers_documents=False), 8, depth)


def _get(client: Any, path: str, offset: int, size: int) -> bytes:
    answer = client.get_object(Bucket="data", Key=f"set/{path}", Range=f"bytes={offset}-{offset + size - 1}")
    return bytes(answer["Body"].read())


def resume() -> Figures:
    """CPU milliseconds to the ids of a step of 8 samples, 200 times: median and longest."""
    random, figures = Random(1), {}
    weights = [(0, [5.0, 2.0, 1.0]), (10**7, [1.0, 1.0, 1.0]), (10**9, [1.0, 2.0, 3.0])]
    for name, sizes in (("one data set", [10**9]), ("three in three phases", [10**9, 10**6, 10**8])):
        took = []
        for _ in range(200):
            cursor = random.randrange(10**11)
            started = time.process_time()  # it waits for nothing: other work on the machine would count in wall time
            _ids(weights, sizes, cursor)
            took.append((time.process_time() - started) * 1000)
        figures[name] = {"median ms": round(statistics.median(took), 2), "longest ms": round(max(took), 2)}
    return figures


def _ids(weights: list[tuple[int, list[float]]], sizes: list[int], cursor: int) -> list[int]:
    mixture = Mixture(weights if len(sizes) > 1 else [(0, [1.0])], 1)
    order = MixedOrder(mixture, [SampleOrder(size, f"1 {size}") for size in sizes])
    return [order.sample_id(n) for n in range(cursor, cursor + 8)]


def opening(folder: Path) -> Figures:
    """CPU seconds to open a data set, milliseconds to read a sample; every shard has 2^22 tokens in 16 batches."""
    manifest, _ = make(str(folder), [2**22], BATCH_TOKENS)
    figures: Figures = {}
    for shards in (10, 100, 1000, 10_000):
        many = manifest.model_copy(
            update={"shards": tuple(manifest.shards) * shards, "tokens": manifest.tokens * shards, "documents": shards}
        )
        (folder / "manifest.json").write_bytes(many.to_bytes())
        opened, took = [], []
        for _ in range(7):
            started = time.process_time()
            opened.append(TokenDataset.open(str(folder), 2048, cache_dir=folder / "cache"))
            took.append(time.process_time() - started)
        sample = statistics.median(
            seconds(lambda dataset=opened[0], index=index: dataset.sample(index))
            for index in Random(1).sample(range(len(opened[0])), 100)
        )
        figures[f"{shards:,} shards"] = {
            "manifest MB": round(len(many.to_bytes()) / 1e6, 1),
            "open CPU s": round(min(took), 4),
            "sample ms": round(sample * 1000, 3),
        }
    return figures


def main() -> None:
    """Print the figures, and write them as JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with plain GETs")
    arguments = parser.parse_args()
    figures: Figures = {"machine": f"{os.cpu_count()} cores, Python {platform.python_version()}"}
    with tempfile.TemporaryDirectory() as place:
        figures["rate"] = rate(Path(place) / "rate")
        figures["resume"] = resume()
        figures["open"] = opening(Path(place) / "open")
        figures["remote"] = remote(Path(place) / "remote", arguments.rounds)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
