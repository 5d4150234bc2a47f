"""What the ranks of the engine tests do; each function runs on every rank and returns picklable values."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.training.engine import Engine
from tests.training.synthetic import SyntheticBatches

Piece = tuple[tuple[int, ...], tuple[int, ...], npt.NDArray[np.float32]]
"""Global shape, offsets and values of one local shard."""


def build(rank: int, job: Job, layout: Layout, **synthetic: Any) -> Engine:
    engine = Engine(job, layout, rank, SyntheticBatches(job, **synthetic))
    engine.initialize()
    return engine


def pieces(engine: Engine) -> dict[str, Piece]:
    """Copies of all local shards."""
    return {
        key: (shard.global_shape, shard.offsets, shard.tensor.cpu().numpy().copy())
        for key, shard in engine.state().items()
    }


def assemble(ranks: list[dict[str, Piece]]) -> dict[str, npt.NDArray[np.float32]]:
    """Global tensors from the pieces of all ranks. Fails unless the pieces cover every element and replicas are bitwise equal."""
    whole: dict[str, npt.NDArray[np.float32]] = {}
    for key in sorted({key for rank in ranks for key in rank}):
        parts = [rank[key] for rank in ranks if key in rank]
        value = np.full(parts[0][0], np.nan, dtype=np.float32)
        written: dict[tuple[Any, ...], bytes] = {}
        count = np.zeros(parts[0][0], dtype=np.int64)
        for shape, offsets, local in parts:
            assert shape == parts[0][0]
            box = (offsets, local.shape)
            digest = hashlib.sha256(local.tobytes()).digest()
            if local.size and box in written:
                assert written[box] == digest, f"{key}: replicas of {box} differ"
            elif local.size:
                written[box] = digest
                region = tuple(slice(o, o + s) for o, s in zip(offsets, local.shape, strict=True))
                value[region] = local
                count[region] += 1
        assert (count == 1).all(), f"{key}: elements held {sorted(set(count.flat))} times instead of once"
        whole[key] = value
    return whole


def train(rank: int, job: Job, layout: Layout, steps: int, synthetic: dict[str, Any]) -> dict[str, Any]:
    """Loss and norm per step, and the state before and after."""
    engine = build(rank, job, layout, **synthetic)
    before = pieces(engine)
    metrics = [engine.train_step(step) for step in range(1, steps + 1)]
    return {
        "before": before,
        "after": pieces(engine),
        "loss": [m.loss for m in metrics],
        "grad_norm": [m.grad_norm for m in metrics],
        "lr": [m.lr for m in metrics],
        "valid": [m.valid_tokens for m in metrics],
    }
