"""What the ranks of the engine tests do; each function runs on every rank and returns picklable values."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.batches import slots_of
from elastic_train.data.samples import Slot
from elastic_train.parallel.mesh import ParallelMesh
from elastic_train.training.engine import Engine, StepGradients, StepMetrics
from elastic_train.training.exact import reduce_exactly
from tests.ranks import run_ranks
from tests.training.synthetic import SyntheticBatches

Array = npt.NDArray[np.float32]
Piece = tuple[tuple[int, ...], tuple[int, ...], Array]
"""Global shape, offsets and values of one local shard."""


@dataclass
class Run:
    """A training run seen from outside: metrics of rank 0 and whole tensors.

    ``gradients``: of every step, by parameter name, gathered, before clipping.
    """

    metrics: list[StepMetrics]
    before: dict[str, Array]
    after: dict[str, Array]
    gradients: list[dict[str, Array]]

    @property
    def losses(self) -> list[float]:
        return [metrics.loss for metrics in self.metrics]

    @property
    def norms(self) -> list[float]:
        return [metrics.grad_norm for metrics in self.metrics]


def run(
    job: Job, layout: Layout, steps: int, *, first: int = 1, state: dict[str, Array] | None = None, **synthetic: Any
) -> Run:
    """Train steps ``first`` .. ``steps`` on ``layout``, from ``state`` or from the initial weights."""
    results = run_ranks(train, layout.world_size, job, layout, range(first, steps + 1), state, synthetic)
    assert all(repr(result[0]) == repr(results[0][0]) for result in results), "ranks report different metrics"
    before, after = (assemble([result[index] for result in results]) for index in (1, 2))
    gradients = [assemble(list(ranks)) for ranks in zip(*(result[3] for result in results), strict=True)]
    return Run(results[0][0], before, after, gradients)


def train(
    rank: int, job: Job, layout: Layout, steps: range, state: dict[str, Array] | None, synthetic: dict[str, Any]
) -> tuple[list[StepMetrics], dict[str, Piece], dict[str, Piece], list[dict[str, Piece]]]:
    engine = Engine(job, layout, rank, SyntheticBatches(job, **synthetic))
    if state is None:
        engine.initialize()
    else:
        write(engine, state)
    before = pieces(engine)
    metrics, gradients = [], []
    for step in steps:
        computed = engine.compute_gradients(step)
        gradients.append(gradient_pieces(engine, computed))
        metrics.append(engine.update(step, computed))
    return metrics, before, pieces(engine), gradients


FLOAT32 = (1e-5, 1e-5, 1e-5)
"""Largest relative difference of loss, norm, and gradients (of the largest element of a tensor) in float32."""


def assert_same_steps(actual: Run, expected: Run, tolerance: tuple[float, float, float] = FLOAT32) -> None:
    """Losses, norms and every parameter's gradient."""
    of_loss, of_norm, of_gradients = tolerance
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=of_loss)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=of_norm)
    assert_same_gradients(actual, expected, of_gradients)


def assert_same_gradients(actual: Run, expected: Run, tolerance: float) -> None:
    """Every parameter's gradient in every step, relative to its largest element."""
    for step, (ours, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True), 1):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            limit = tolerance * float(np.abs(value).max())
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=limit, err_msg=f"step {step}: {name}")


def write(engine: Engine, state: dict[str, Array]) -> None:
    """Copy this rank's boxes of whole tensors into the engine, as a restore does, and let compute follow."""
    for key, shard in engine.state().items():
        region = tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.tensor.shape, strict=True))
        shard.tensor.copy_(torch.from_numpy(state[key][region]))
    engine.publish()


def pieces(engine: Engine) -> dict[str, Piece]:
    """Copies of all local shards, in float32."""
    return {
        key: (shard.global_shape, shard.offsets, shard.tensor.float().cpu().numpy().copy())
        for key, shard in engine.state().items()
    }


def gradient_pieces(engine: Engine, gradients: StepGradients) -> dict[str, Piece]:
    """Copies of all local gradients by parameter name, in float32. To be taken before ``update``, which clips."""
    state = engine.state()
    pieces: dict[str, Piece] = {}
    for name, gradient in gradients.shards.items():
        shard = state[f"param.{name}"]
        assert gradient.shape == shard.tensor.shape, f"{name}: gradient {gradient.shape}, shard {shard.tensor.shape}"
        pieces[name] = (shard.global_shape, shard.offsets, gradient.detach().float().cpu().numpy().copy())
    return pieces


def assemble(ranks: list[dict[str, Piece]]) -> dict[str, Array]:
    """Whole tensors from the pieces of all ranks. Fails unless every element is there once and replicas are equal."""
    whole: dict[str, Array] = {}
    for key in sorted({key for rank in ranks for key in rank}):
        parts = [rank[key] for rank in ranks if key in rank]
        value = np.empty(parts[0][0], dtype=np.float32)
        count = np.zeros(parts[0][0], dtype=np.int64)
        digests: dict[tuple[Any, ...], bytes] = {}
        for shape, offsets, local in parts:
            assert shape == parts[0][0]
            # The sign of a NaN is nobody's.
            digest = hashlib.sha256(np.where(np.isnan(local), np.float32(np.nan), local).tobytes()).digest()
            if local.size and (offsets, local.shape) in digests:
                assert digests[offsets, local.shape] == digest, f"{key}: replicas at {offsets} differ"
            elif local.size:
                digests[offsets, local.shape] = digest
                region = tuple(slice(o, o + s) for o, s in zip(offsets, local.shape, strict=True))
                value[region] = local
                count[region] += 1
        assert (count == 1).all(), f"{key}: elements are held {sorted(set(count.flat))} times"
        whole[key] = value
    return whole


def count_beats(rank: int, job: Job, layout: Layout) -> tuple[int, int]:
    """Beats of one step, and number of blocks of this rank."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    beats = []
    engine.on_progress = lambda: beats.append(1)
    engine.train_step(1)
    return len(beats), sum(key.startswith("param.") and key.endswith("q_proj.weight") for key in engine.state())


class SlowBatches(SyntheticBatches):
    """Slots that wait for ``ready``; notes how long they did."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ready = threading.Event()
        self.waited = 0.0

    def load(self, step: int, slots: range) -> list[Slot]:
        started = time.perf_counter()
        assert self.ready.wait(60)
        self.waited += time.perf_counter() - started
        return super().load(step, slots)


def waits_for_data(rank: int, job: Job, layout: Layout) -> tuple[float, float, float, float]:
    """Seconds of a step: its slots waited, the engine says, it took; and what the engine says of the next one."""
    batches = SlowBatches(job)
    engine = Engine(job, layout, rank, batches)
    engine.initialize()
    threading.Timer(0.5, batches.ready.set).start()
    started = time.perf_counter()
    engine.train_step(1)
    told, took = engine.data_seconds, time.perf_counter() - started
    engine.train_step(2)
    return batches.waited, told, took, engine.data_seconds


def loss_and_norm(
    rank: int, layout: Layout, losses: list[list[float]], parts: list[list[float]], copies: int, invalid: int | None
) -> tuple[float, float]:
    """Of one parameter, of which this rank holds ``parts[rank]``, as ``determinism: exact`` finds them."""
    mesh = ParallelMesh(layout, rank, torch.device("cpu"))
    slots = slots_of(mesh.data_rank, layout.data_ranks, 4)
    gradients, own = {"q_proj.weight": torch.tensor(parts[rank])}, [torch.tensor(loss) for loss in losses[rank]]
    return reduce_exactly(own, slots, gradients, {"q_proj.weight": copies}, mesh, count=4, invalid=rank == invalid)


def late_imports(rank: int, job: Job, layout: Layout) -> list[str]:
    """Modules that building an engine and running a step import in a freshly forked rank."""
    known = set(sys.modules)
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    engine.initialize()
    engine.train_step(1)
    return sorted(set(sys.modules) - known)
