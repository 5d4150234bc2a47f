"""How many requests saves and loads make and how much memory they take: what makes them fast, without a clock."""

from __future__ import annotations

import secrets
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.reader import restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.config.operation import StorageConfig
from elastic_train.storage.s3_upload import PARALLEL, upload
from elastic_train.storage.store import Store
from tests.checkpoint.states import emptied, even_layout, same, save
from tests.s3_server import S3Server

MIB = 2**20
PART = 8 * MIB
"""Of an upload."""
WINDOW = 16 * MIB
"""Read at once."""


def floats(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.float32)


@contextmanager
def requests(store: Any) -> Iterator[Counter[str]]:
    """Counts the requests of an S3 store by operation, from the moment that its client is there."""
    assert not store.exists("nothing")
    counted: Counter[str] = Counter()
    events = store._bucket._client.meta.events

    def count(model: Any, **_: Any) -> None:
        counted[model.name] += 1

    events.register("before-call.s3", count)
    try:
        yield counted
    finally:
        events.unregister("before-call.s3", count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "saving", "loading"),
    [
        ([MIB] * 7, {"PutObject": 1}, 1),
        ([64 * 1024] * 100, {"PutObject": 1}, 1),
        ([5 * MIB] * 4, {"CreateMultipartUpload": 1, "ListParts": 1, "UploadPart": 3, "CompleteMultipartUpload": 1}, 2),
        ([20 * MIB, 4], {"CreateMultipartUpload": 1, "ListParts": 1, "UploadPart": 3, "CompleteMultipartUpload": 1}, 2),
    ],
    ids=["one part", "small tensors together", "tensors of five MiB", "one large tensor"],
)
def test_requests_of_a_save_and_a_load(
    s3_environment: S3Server, s3_bucket: str, tmp_path: Path, sizes: list[int], saving: dict[str, int], loading: int
) -> None:
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    store = Store.open(uri, StorageConfig(endpoint_url=s3_environment.endpoint_url))
    states = even_layout({f"t{index:03d}": floats(size) for index, size in enumerate(sizes)}, 1)
    with requests(store) as counted:
        manifest = save(store, tmp_path, states, step=1)
    assert counted == saving
    target = emptied(states[0])
    with requests(store) as counted:
        restored = restore(target, parts_of(store, manifest))
    assert counted == {"GetObject": loading}
    assert restored.bytes_read == {"object": sum(sizes)}
    assert same(target, states[0])


def peak_bytes(work: Callable[[], object]) -> int:
    """Python's own memory (buffers among it, tensors not) at most, beyond what there was."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


class Slow:
    """An S3 client whose parts are all under way before one is answered."""

    def __init__(self) -> None:
        self._all = threading.Barrier(PARALLEL)

    def upload_part(self, **_: Any) -> dict[str, str]:
        self._all.wait(timeout=60)
        return {"ETag": "e"}

    def __getattr__(self, name: str) -> Callable[..., dict[str, str]]:
        return lambda **_: {"UploadId": "u"}


@pytest.mark.parametrize("parts", [2 * PARALLEL, 4 * PARALLEL])
def test_an_upload_holds_the_parts_under_way_and_the_next(parts: int) -> None:
    piece, client = memoryview(bytes(MIB)), Slow()

    def send() -> None:
        pieces = (piece for _ in range(parts * PART // MIB))
        written = upload("s3://b/x", {}, lambda request: request(client), pieces, parts * PART)
        assert written == parts * PART

    peak = peak_bytes(send)
    assert PARALLEL * PART < peak < (PARALLEL + 2) * PART


@pytest.mark.parametrize("mib", [96, 160])
def test_a_load_holds_a_few_windows_of_a_large_tensor(tmp_path: Path, mib: int) -> None:
    states = even_layout({"large": floats(mib * MIB).view(mib, -1), "small": floats(4096)}, 1)
    store = Store.open(str(tmp_path / "job"))
    parts = parts_of(store, save(store, tmp_path, states, step=1))
    target = emptied(states[0])
    threads, copies = 2, 2  # a local store gives bytes, which are copied to where they can be changed
    peak = peak_bytes(lambda: restore(target, parts, threads=threads))
    assert same(target, states[0])
    assert peak < threads * copies * WINDOW + 2 * MIB
