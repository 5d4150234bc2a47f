"""How many bytes move: from partners exactly those of the shards, from storage the blocks that they touch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from elastic_train.checkpoint import fetch
from elastic_train.checkpoint.byte_server import ByteServer
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.reader import Part, restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.checkpoint.sources import Bytes, ImageSource, RemoteSource
from elastic_train.storage.store import Store
from tests.checkpoint.states import (
    State,
    cut,
    emptied,
    even_layout,
    random_layout,
    same,
    save,
    some_tensors,
    write_images,
)


def nbytes(state: State) -> int:
    return sum(shard.tensor.nbytes for shard in state.values())


def remote_parts(server: ByteServer, paths: list[Path], step: int) -> list[Part]:
    return [Part(Image.open(p).description(), RemoteSource(server.address, "token", p.name, step)) for p in paths]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("request_bytes", [64, 8 * 2**20])
def test_from_partners_exactly_the_bytes_of_the_shards_move(
    seed: int, request_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a shard takes many requests, because it is large against one."""
    monkeypatch.setattr(fetch, "RUN_BYTES", request_bytes)
    rng = random.Random(seed)
    full = some_tensors(seed)
    paths = write_images(tmp_path, random_layout(full, rng), step=3)
    server = ByteServer("127.0.0.1", 0, "token", tmp_path).start()
    parts = remote_parts(server, paths, 3)
    for rank, wanted in enumerate(random_layout(full, rng)):
        target = emptied(wanted)
        assert restore(target, parts, rank=rank).bytes_read.total() == nbytes(wanted)
        assert same(target, wanted)
    for part in parts:
        part.source.close()
    server.close()


def columns(full: torch.Tensor, begin: int, end: int) -> State:
    return {"w": cut(full, [[], [begin, end]], [0, 1])}


def blocks_touched(full: torch.Tensor, begin: int, end: int) -> int:
    """Bytes of the blocks of a row-major tensor that have some of columns ``[begin, end)``."""
    numbers = np.arange(full.nbytes).reshape(full.shape[0], -1)[:, begin * 4 : end * 4]
    touched = np.unique(numbers // BLOCK_BYTES)
    return sum(min(BLOCK_BYTES, full.nbytes - int(block) * BLOCK_BYTES) for block in touched)


@pytest.mark.parametrize(("begin", "end", "blocks"), [(1, 1000, 8), (399_000, 600_001, 14), (999_999, 1_000_000, 8)])
def test_from_storage_the_blocks_that_hold_a_piece_of_columns(
    tmp_path: Path, begin: int, end: int, blocks: int
) -> None:
    """Rows of 4 MB: each has a block or two with the columns, and several without, which stay where they are."""
    full = torch.randn(8, 1_000_001)
    store = Store.open(str(tmp_path / "job"))
    parts = parts_of(store, save(store, tmp_path, even_layout({"w": full}, 1), step=2))
    wanted = columns(full, begin, end)
    target = emptied(wanted)
    moved = restore(target, parts).bytes_read
    assert same(target, wanted)
    assert moved == {"object": blocks_touched(full, begin, end)}
    assert blocks * BLOCK_BYTES >= moved["object"] > (blocks - 1) * BLOCK_BYTES


def test_small_gaps_are_read_over_and_counted(tmp_path: Path) -> None:
    full = torch.randn(64, 64)
    store = Store.open(str(tmp_path / "job"))
    parts = parts_of(store, save(store, tmp_path, even_layout({"w": full}, 1), step=2))
    target = emptied(columns(full, 0, 3))
    assert restore(target, parts).bytes_read == {"object": 64 * 64 * 4}  # one block, and shorter than one
    assert same(target, columns(full, 0, 3))


class Counting(RemoteSource):
    """Counts requests; the bytes come from an image on this node."""

    kind: ClassVar[str] = "counted"

    def __init__(self, path: Path, step: int) -> None:
        self._near = ImageSource(path, step)
        self.requests: list[int] = []

    def gather(self, runs: list[fetch.Runs]) -> Bytes:  # type: ignore[override]
        self.requests.append(len(runs))
        found = [self._near.read(b, run.length) for run in runs for b in range(run.begin, run.end, run.stride)]
        return np.concatenate(found)


def test_many_small_shards_come_in_few_requests(tmp_path: Path) -> None:
    full = {f"w{number:03d}": torch.randn(30, 20) for number in range(2000)}
    (path,) = write_images(tmp_path, even_layout(full, 1), step=1)
    source = Counting(path, 1)
    wanted = even_layout(full, 4, dim=1)[1]
    target = emptied(wanted)
    assert restore(target, [Part(Image.open(path).description(), source)]).bytes_read == {"counted": nbytes(wanted)}
    assert same(target, wanted)
    assert source.requests == [1024, 976]
