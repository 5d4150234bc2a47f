"""Makes committed checkpoints of one small tensor per rank, without training."""

from __future__ import annotations

import json

import numpy as np
import xxhash

from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.manifest import ChunkRecord, Manifest, TensorRecord, object_path
from elastic_train.storage.store import Store
from tests.checkpoint.states import first_claim


def job_record(store: Store, seed: int = 1) -> None:
    """The ``job.json`` of a job that keeps two checkpoints."""
    record = {"format_version": 1, "name": "job", "created": 1.7e9, "version": "0.1.0"}
    record |= {"identity": {"model": {}, "seed": seed}, "config": {"name": "job", "checkpoint": {"keep_last": 2}}}
    store.write("job.json", [json.dumps(record).encode()])


def commit_checkpoint(
    store: Store,
    step: int,
    generation: int = 1,
    ranks: int = 2,
    metrics: dict[str, float] | None = None,
    hosts: Store | None = None,
) -> None:
    """A checkpoint of ``step`` in the job folder: one vector of 8 floats per rank, cut from one tensor.

    ``hosts`` is the same folder, as those see it that upload the objects.
    """
    chunks, objects = [], {}
    for rank in range(ranks):
        data = np.arange(8, dtype=np.float32) + rank + step
        path = object_path(step, generation, rank)
        objects[path] = (hosts or store).write(path, [data.tobytes()])
        digest = xxhash.xxh3_64_hexdigest(data.tobytes())
        chunks.append(
            ChunkRecord(offsets=(8 * rank,), sizes=(8,), object=path, byte_offset=0, nbytes=32, xxh3=(digest,))
        )
    manifest = Manifest(
        step=step,
        claim=1,
        created=1.7e9,
        metrics=metrics or {},
        block_bytes=BLOCK_BYTES,
        cursor=8 * step,
        generation=generation,
        seed=1,
        layout={"pp": 1, "dp_replicate": 1, "dp_shard": ranks, "cp": 1, "tp": 1},
        config_digest="c" * 64,
        data_digest="d" * 64,
        model={},
        versions={"torch": "2.13.0"},
        objects=objects,
        tensors={"param.model.norm.weight": TensorRecord(dtype="float32", shape=(8 * ranks,), chunks=tuple(chunks))},
    )
    assert commit(store, manifest, first_claim(store)).created
