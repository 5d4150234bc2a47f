"""Makes committed checkpoints of one small tensor per rank, without training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.checksums import BLOCK_BYTES
from elastic_train.checkpoint.manifest import ChunkRecord, Manifest, TensorRecord, object_path
from elastic_train.storage.store import Store
from tests.checkpoint.states import first_claim


def commit_checkpoint(folder: Path, step: int, generation: int = 1, ranks: int = 2) -> None:
    """A checkpoint of ``step`` in the job folder: one vector of 8 floats per rank, cut from one tensor."""
    store = Store.open(str(folder))
    chunks, objects = [], {}
    for rank in range(ranks):
        data = np.arange(8, dtype=np.float32) + rank + step
        path = object_path(step, generation, rank)
        objects[path] = store.write(path, [data.tobytes()])
        digest = xxhash.xxh3_64_hexdigest(data.tobytes())
        chunks.append(
            ChunkRecord(offsets=(8 * rank,), sizes=(8,), object=path, byte_offset=0, nbytes=32, xxh3=(digest,))
        )
    manifest = Manifest(
        step=step,
        claim=1,
        created=1.7e9,
        metrics={},
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
