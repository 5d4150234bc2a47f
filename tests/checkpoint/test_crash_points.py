"""Deaths at every point of a save: real ones of a forked process on a local store, simulated ones on a real S3 server.

After each, the loader gets the newest committed checkpoint, bit for bit, and the step can be saved again.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.claims import Claim
from elastic_train.checkpoint.restore_checkpoint import restore_from_checkpoint
from elastic_train.checkpoint.tidy import tidy
from elastic_train.config.operation import CheckpointConfig, SnapshotConfig, StorageConfig
from elastic_train.controller.resumption import take_over
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Store
from tests.checkpoint.states import Global, State, emptied, even_layout, same, upload_images, write_images
from tests.s3_server import S3Server

DEATHS = 500
SETTINGS = CheckpointConfig(keep_last=1, grace_seconds=0.0)
SYSTEM_CALLS = ("open", "write", "fsync", "link", "rename", "unlink", "rmdir", "mkdir", "close")
"""With which the local store does all that it does."""


def tensors(seed: int, nbytes: int = 3000) -> Global:
    """Sizes that divide nothing; ``big`` is cut, ``small`` replicated."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(nbytes // 44, 11, generator=generator),
        "odd": torch.randn(7, 5, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(seed)),
    }


def save(store: Store, claim: Claim, images: Sequence[Path], step: int, attempt: int = 1) -> None:
    """What hosts and coordinator do, in this order: all uploads, merge, commit, retention."""
    manifest = upload_images(store, images, step, 1, f"c{claim.number}-{attempt}", claim.number)
    commit(store, manifest, claim)
    assert tidy(store, claim, SETTINGS).error == ""


def loaded(store: Store, states: dict[int, Global]) -> int:
    """Loads into another layout; the step, whose state it is to the last bit."""
    target = emptied(even_layout(states[max(states)], 1)[0])
    found = restore_from_checkpoint(target, store)
    assert found is not None
    step = found.manifest.step
    assert same(target, even_layout(states[step], 1)[0]), f"step {step} is not as it was saved"
    return step


@dataclass
class Death:
    """Kills this process (a forked one) before its system call ``at``, or in a write after ``nbytes`` bytes in all."""

    at: int | None
    nbytes: int | None = None
    calls: int = 0
    written: int = 0

    def arm(self) -> None:
        for name in SYSTEM_CALLS:
            setattr(os, name, self._deadly(name, getattr(os, name)))

    def _deadly(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                os._exit(77)
            if name == "write" and self.nbytes is not None:
                if self.written + len(args[1]) > self.nbytes:
                    real(args[0], args[1][: self.nbytes - self.written])
                    os._exit(77)
                self.written += len(args[1])
            return real(*args, **keywords)

        return call


def dies(death: Death, work: Callable[[], None]) -> bool:
    """Whether ``work`` was killed in a child; False when it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child uses none of them
        pid = os.fork()
    if pid == 0:
        try:
            death.arm()
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 77), f"the child ended with {code}"
    return code == 77


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory: the test is about what is there after a death, and disks are slow at fsync."""
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=SnapshotConfig().directory) as name:
        yield Path(name)


@pytest.mark.slow
def test_500_deaths_at_all_points_of_a_save(memory_path: Path) -> None:
    states = {5: tensors(5), 10: tensors(10), 20: tensors(20)}
    images = {
        step: write_images(memory_path, even_layout(state, 3), step, buffer=step) for step, state in states.items()
    }
    again = write_images(memory_path, even_layout(states[20], 2, dim=1), 20, generation=2)
    template, job = memory_path / "template", memory_path / "job"
    before = LocalStore(template)
    claim = take_over(before, "first", 1.0).claim
    for step in (5, 10):
        manifest = upload_images(before, images[step], step, 1, "c1-1", claim.number)
        commit(before, manifest, claim)
    before.write("checkpoints/step-00000007-g1-c1-3/rank-00000.bin", [b"of a save that was given up"])
    store = LocalStore(job)
    size = sum(entry.size for entry in before.list("checkpoints/step-00000010-"))  # of what a save writes, nearly

    def one(death: Death) -> tuple[bool, int]:
        shutil.rmtree(job, ignore_errors=True)
        shutil.copytree(template, job)
        dead = dies(death, lambda: save(store, claim, images[20], 20, attempt=2))
        step = loaded(store, states)
        assert step in (10, 20)
        successor = take_over(store, "next", 2.0)
        assert successor.checkpoint is not None
        assert successor.checkpoint.step == step
        if step == 10:
            save(store, successor.claim, again, 20)
        assert loaded(store, states) == 20
        return dead, step

    calls: list[int] = []
    for at in itertools.count(1):
        dead, step = one(Death(at))
        if not dead:
            break
        calls.append(step)
    assert calls == sorted(calls)  # one call makes the checkpoint; before it there is the old one, after it the new one
    rng = random.Random(4)
    seen = Counter(calls)
    for _ in range(DEATHS - len(calls)):
        dead, step = one(Death(None, rng.randrange(size)))
        assert dead
        seen[step] += 1
    assert sum(seen.values()) >= DEATHS
    assert seen[10] >= 20
    assert seen[20] >= 20


# -- S3 --------------------------------------------------------------------------------------------------------------


class Died(BaseException):
    """The end of a simulated process: nothing of it may be caught, and no request is sent afterwards."""


class Torn:
    """A body that ends its process in the middle."""

    def __init__(self, body: bytes) -> None:
        self._rest = memoryview(body)[: len(body) // 2]

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            raise Died
        size = min(size, 65536) if size > 0 else 65536
        data, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return data


class DeadlyRequests:
    """Dies at request ``at`` of an S3 client: before it is sent, or in the middle of its body."""

    def __init__(self, at: int, in_body: bool) -> None:
        self.at, self.in_body = at, in_body
        self.requests: list[str] = []
        self.dead = False
        self._lock = threading.Lock()

    def __call__(self, request: Any, **_: Any) -> None:
        with self._lock:
            if self.dead:
                raise Died
            self.requests.append(f"{request.method} {request.url.partition('?')[2]}")
            if len(self.requests) < self.at:
                return
            self.dead = True
            if not self.in_body or request.method != "PUT" or not request.body:
                raise Died
            body = request.body if isinstance(request.body, bytes | bytearray) else request.body.read()
            request.body = Torn(bytes(body))


def stages(full: Global) -> list[State]:
    """Two ranks: one has the large tensor, the other the rest."""
    whole = even_layout(full, 1)[0]
    return [{"big": whole["big"]}, {key: shard for key, shard in whole.items() if key != "big"}]


def s3_store(server: S3Server, bucket: str, name: str) -> tuple[Store, Any]:
    """A store of its own client, and the client."""
    config = StorageConfig(endpoint_url=server.endpoint_url, retry_seconds=5.0)
    store = Store.open(f"s3://{bucket}/{name}", config)
    store.exists("nothing")
    return store, store._bucket._client  # type: ignore[attr-defined]


@pytest.mark.slow
def test_deaths_at_every_request_of_a_save_to_s3(
    tmp_path: Path, s3_environment: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small object, and one of two parts. One job folder: each death leaves its remains to the next save."""
    monkeypatch.setattr("elastic_train.storage.s3_upload.MIN_PART", 5 * 2**20)
    store, _ = s3_store(s3_environment, s3_bucket, "crash points")
    states = {10: tensors(10, 6 * 2**20)}
    save(store, take_over(store, "first", 1.0).claim, write_images(tmp_path, stages(states[10]), 10), 10)
    outcomes: list[tuple[str, bool, bool]] = []
    at, in_body, last = 1, False, 10
    while True:
        step = last + 10
        states[step] = tensors(step, 6 * 2**20)
        claim = take_over(store, "dying", 2.0).claim
        dying, client = s3_store(s3_environment, s3_bucket, "crash points")
        deadly = DeadlyRequests(at, in_body)
        client.meta.events.register("before-send.s3", deadly)
        with suppress(Died):
            save(dying, claim, write_images(tmp_path, stages(states[step]), step), step)
        if not deadly.dead:
            break
        found = loaded(store, states)
        assert found in (last, step)
        successor = take_over(store, "next", 3.0)
        outcomes.append((deadly.requests[-1], found == step, bool(store.unfinished("checkpoints/"))))
        if found != step:
            save(store, successor.claim, write_images(tmp_path, even_layout(states[step], 3, dim=1), step, 2), step)
        else:
            tidy(store, successor.claim, SETTINGS)
        assert loaded(store, states) == step
        del states[last]
        last = step
        if deadly.requests[-1].startswith("PUT") and not in_body:
            in_body = True
        else:
            at, in_body = at + 1, False
    assert len(outcomes) >= 20
    assert {created for _, created, _ in outcomes} == {True, False}
    assert any(unfinished for _, _, unfinished in outcomes)  # an open upload is seen ...
    assert store.unfinished("checkpoints/") == []  # ... and gone when a later save is over
