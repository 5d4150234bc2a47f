"""What benchmarks/checkpoints.py measures: each function prepares in a rank's process and returns the work."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.catalog import commit as commit_manifest
from elastic_train.checkpoint.catalog import read_catalog
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.claims import FRESH, newest_claim, take_claim
from elastic_train.checkpoint.image import Image, image_name
from elastic_train.checkpoint.manifest import Manifest, UploadedObject, merge, object_path
from elastic_train.checkpoint.restore_checkpoint import restore_from_checkpoint
from elastic_train.checkpoint.upload import upload_image
from elastic_train.config.operation import StorageConfig
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.store import Store

LAYERS = 10
STREAMS = 4
"""Of pyarrow, per rank: as many parts as ours are under way at once."""
SNAPSHOTS, ASYNC_SAVES = 10, 3

State = dict[str, LocalShard]


@dataclass(frozen=True, slots=True)
class Run:
    """A rank of a row: ``nbytes`` of all ranks, and where to save. Without ``bucket`` that is ``folder``."""

    nbytes: int
    ranks: int
    rank: int
    step: int
    folder: Path
    images: Path
    group: str = ""
    """Name of the process group's file, another one for each row."""
    bucket: str = ""
    endpoint_url: str = ""

    def store(self) -> Store:
        """The job folder, with a connection made."""
        uri = f"s3://{self.bucket}/job" if self.bucket else str(self.folder / "job")
        store = Store.open(uri, StorageConfig(endpoint_url=self.endpoint_url or None))
        store.exists("nothing")
        return store


def state_of(run: Run) -> State:
    """This rank's rows of all tensors: matrices of ten layers, their moments; other values in each tensor."""
    width = math.isqrt(run.nbytes // (3 * 4 * 13 * LAYERS))
    shapes = [(width, width)] * 4 + [(width, 3 * width)] * 3 + [(width,)] * 2
    share = -(-width // run.ranks)
    first, last = min(run.rank * share, width), min((run.rank + 1) * share, width)
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(run.rank))
    state: State = {}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        for layer in range(LAYERS):
            for index, shape in enumerate(shapes):
                mine = (last - first, *shape[1:])
                count = math.prod(mine)
                tensor = values.repeat(-(-count // len(values)))[:count].clone().mul_(len(state) + 1).view(mine)
                offsets = (first,) + (0,) * (len(shape) - 1)
                state[f"{kind}.layers.{layer}.{index}"] = LocalShard(tensor, shape, offsets)
    return state


def snapshot(run: Run, state: State) -> tuple[Capture, Image]:
    """The state in an image of shared memory, as a trainer leaves it to its host."""
    capture = Capture(state)
    path = run.images / image_name(run.step, run.rank, 0)
    image = Image.create(path, run.step, run.rank, capture.description)
    capture.write(image, run.step)
    path.unlink()  # the memory is free when the process ends
    return capture, image


def upload(run: Run) -> Callable[[], Any]:
    """An image to storage."""
    store = run.store()
    capture, image = snapshot(run, state_of(run))
    return lambda: {"uploaded": _upload(run, store, capture, image)}


def snapshot_and_upload(run: Run) -> Callable[[], Any]:
    """A state to storage: the snapshot, for which a step waits, and the upload, for which it does not."""
    store = run.store()
    capture, image = snapshot(run, state_of(run))

    def save() -> dict[str, Any]:
        began = time.perf_counter()
        capture.write(image, run.step)
        blocked = time.perf_counter() - began
        return {"uploaded": _upload(run, store, capture, image), "blocked": [blocked]}

    return save


def _upload(run: Run, store: Store, capture: Capture, image: Image) -> UploadedObject:
    chunks = range(len(capture.description.chunks))
    path = object_path(run.step, 1, run.rank)
    return upload_image(image, run.step, capture.description, chunks, store, path)


def commit(run: Run, uploads: list[UploadedObject]) -> Callable[[], Any]:
    """Makes the objects of all ranks a checkpoint, as the coordinator does."""
    store = run.store()
    claim = newest_claim(store) or take_claim(store, FRESH, "benchmark", time.time())

    def do() -> None:
        tensors, objects = merge(uploads)
        known: dict[str, Any] = {"step": run.step, "claim": claim.number, "generation": 1, "cursor": 0, "seed": 0}
        manifest = Manifest(
            **known, created=time.time(), layout={}, config_digest="", data_digest="", model={}, metrics={},
            versions={}, block_bytes=BLOCK_BYTES, objects=objects, tensors=tensors,
        )  # fmt: skip
        assert commit_manifest(store, manifest, claim).created

    return do


def load(run: Run) -> Callable[[], Any]:
    """The rank's part of the checkpoint: list, manifest, every byte read and its checksum compared."""
    store = run.store()
    read_catalog(store)  # what a process asks for the first time costs imports
    target = _emptied(state_of(run))

    def restore() -> Callable[[], None]:
        restore_from_checkpoint(target, store, step=run.step, rank=run.rank, expected_keys=target.keys())
        return lambda: _check(run, {key: shard.tensor for key, shard in target.items()})

    return restore


def _emptied(state: State) -> State:
    for shard in state.values():
        shard.tensor.zero_()
    return state


def _check(run: Run, loaded: dict[str, torch.Tensor]) -> None:
    for key, shard in state_of(run).items():
        assert torch.equal(shard.tensor, loaded[key]), f"{key} was not loaded right"


def _pyarrow(run: Run) -> Any:
    import pyarrow.fs

    files = pyarrow.fs.S3FileSystem(
        endpoint_override=run.endpoint_url.removeprefix("http://"), scheme="http", region="us-east-1",
        access_key=os.environ["AWS_ACCESS_KEY_ID"], secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        allow_delayed_open=True, background_writes=False,
    )  # fmt: skip
    files.get_file_info(f"{run.bucket}/nothing")  # a connection
    return files


def _streams(run: Run, data: Any, move: Callable[[str, Any], object]) -> Callable[[], Any]:
    """``move(object, part)`` for as many parts of ``data`` as there are streams, in threads."""
    view = memoryview(data).cast("B")
    share = -(-len(view) // STREAMS)
    jobs = [(f"{run.bucket}/plain/{run.rank}-{n}", view[n * share : (n + 1) * share]) for n in range(STREAMS)]

    def do() -> None:
        with ThreadPoolExecutor(STREAMS) as pool:
            for done in [pool.submit(move, *job) for job in jobs]:
                done.result()

    return do


def pyarrow_put(run: Run) -> Callable[[], Any]:
    """As many bytes from the same memory, without checksums of ours or a manifest."""
    files = _pyarrow(run)
    _, image = snapshot(run, state_of(run))

    def put(path: str, part: Any) -> None:
        with files.open_output_stream(path) as stream:
            stream.write(part)

    return _streams(run, image.data, put)


def pyarrow_get(run: Run) -> Callable[[], Any]:
    """What ``pyarrow_put`` has put, into memory that is there."""
    files = _pyarrow(run)
    _, image = snapshot(run, state_of(run))
    target = torch.zeros(image.nbytes, dtype=torch.uint8)

    def get(path: str, part: Any) -> None:
        with files.open_input_file(path) as stream:
            assert stream.readinto(part) == len(part)

    return _streams(run, target.numpy(), get)


def torch_save(run: Run) -> Callable[[], Any]:
    """One file per rank, on disk at the end as the other rows' files are."""
    state = _tensors(run, state_of(run))

    def save() -> None:
        with (run.folder / f"{run.rank}.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    return save


def torch_load(run: Run) -> Callable[[], Any]:
    """Into the tensors that are there, as a model's ``load_state_dict`` copies."""
    target = _tensors(run, _emptied(state_of(run)))

    def restore() -> Callable[[], None]:
        loaded = torch.load(run.folder / f"{run.rank}.pt", weights_only=True)
        for key, tensor in target.items():
            tensor.copy_(loaded[key])
        return lambda: _check(run, _plain(run, target))

    return restore


def dcp_save(run: Run) -> Callable[[], Any]:
    _join(run)
    state = _tensors(run, state_of(run))
    return lambda: _nothing(dcp.save(state, storage_writer=_writer(run)))


def dcp_load(run: Run) -> Callable[[], Any]:
    _join(run)
    target = _tensors(run, _emptied(state_of(run)))

    def restore() -> Callable[[], None]:
        dcp.load(target, storage_reader=dcp.FileSystemReader(run.folder / "dcp"))
        return lambda: _check(run, _plain(run, target))

    return restore


def dcp_async_save(run: Run) -> Callable[[], Any]:
    return _async_saves(run, 1)


def dcp_async_saves(run: Run) -> Callable[[], Any]:
    """Several with one stager, which keeps its buffers: the first save makes them."""
    return _async_saves(run, ASYNC_SAVES)


def _async_saves(run: Run, count: int) -> Callable[[], Any]:
    _join(run)
    state = _tensors(run, state_of(run))
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def save() -> dict[str, Any]:
        blocked = []
        for _ in range(count):
            began = time.perf_counter()
            future: Any = dcp.async_save(state, storage_writer=_writer(run), async_stager=stager)
            blocked.append(time.perf_counter() - began)
            getattr(future, "upload_completion", future).result()
        return {"blocked": blocked}

    return save


def snapshots(run: Run) -> Callable[[], Any]:
    """What a step waits for: the copy into shared memory, again and again as after each step."""
    capture, image = snapshot(run, state_of(run))

    def write() -> dict[str, Any]:
        blocked = []
        for step in range(SNAPSHOTS):
            began = time.perf_counter()
            capture.write(image, step)
            blocked.append(time.perf_counter() - began)
        return {"blocked": blocked}

    return write


def _tensors(run: Run, state: State) -> dict[str, torch.Tensor]:
    """Names of the rank's own: DCP would take equal ones for replicas and save one of them."""
    return {f"{run.rank}.{key}": shard.tensor for key, shard in state.items()}


def _plain(run: Run, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{run.rank}."): tensor for key, tensor in tensors.items()}


def _writer(run: Run) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(run.folder / "dcp", overwrite=True)


def _join(run: Run) -> None:
    store = dist.FileStore(str(run.folder / run.group), run.ranks)
    dist.init_process_group("gloo", store=store, rank=run.rank, world_size=run.ranks)


def _nothing(_: object) -> None:
    """The metadata that a save returns is not sent to the parent."""
