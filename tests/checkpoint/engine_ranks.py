"""What the ranks of live restores do; each function runs inside a gloo group, for several engines one after another."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_train.checkpoint.capture import Capture
from elastic_train.checkpoint.image import Image, adoptable, image_name
from elastic_train.checkpoint.manifest import CheckpointId, read_manifest
from elastic_train.checkpoint.reader import Part, restore
from elastic_train.checkpoint.restore_checkpoint import parts_of
from elastic_train.checkpoint.sources import ImageSource
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.data.batches import StepBatches
from elastic_train.data.order import SampleOrder
from elastic_train.data.samples import Sample
from elastic_train.parallel.shard import Box
from elastic_train.storage.store import Store
from elastic_train.training.engine import Engine
from elastic_train.training.state_keys import state_keys
from tests.samples import OneByOne, sample_of
from tests.training.synthetic import SyntheticBatches


@dataclass(frozen=True)
class Setup:
    """A job in a layout, by a name of its own."""

    name: str
    job: Job
    layout: Layout


@dataclass(frozen=True)
class Landed:
    """What one rank found after a restore from ``source``: its boxes, keys of wrong tensors, the loss of step 2."""

    target: str
    source: str
    boxes: dict[str, Box]
    wrong: list[str]
    loss: float
    bytes_read: dict[str, int]


def write_image(engine: Engine, rank: int, step: int, folder: Path) -> None:
    capture = Capture(engine.state())
    image = Image.create(folder / image_name(1, rank, 0), 1, rank, capture.description)
    capture.write(image, step)


def save_all(rank: int, setups: list[Setup], root: Path) -> dict[str, float]:
    """Each trains step 1, writes its images to the folder of its name, and goes on to step 2: the loss of that."""
    losses = {}
    for setup in setups:
        engine = Engine(setup.job, setup.layout, rank, SyntheticBatches(setup.job))
        engine.initialize()
        engine.train_step(1)
        write_image(engine, rank, 1, root / setup.name)
        losses[setup.name] = engine.train_step(2).loss
    return losses


def restore_all(rank: int, targets: list[Setup], sources: list[str], root: Path) -> list[Landed]:
    """Each of ``targets`` restores the images in the folder of each of ``sources`` and trains step 2.

    ``root/source.pt`` has the whole tensors of a source.
    """
    landed = []
    for target in targets:
        engine = Engine(target.job, target.layout, rank, SyntheticBatches(target.job))
        state = engine.state()
        for source in sources:
            for shard in state.values():
                shard.tensor.detach().fill_(torch.nan)
            images = adoptable(root / source)
            parts = [Part(image.description, ImageSource(image.path, 1)) for image in images]
            restored = restore(state, parts, rank=rank, expected_keys=state_keys(target.job))
            full = torch.load(root / f"{source}.pt", mmap=True, weights_only=True)
            boxes = {key: Box(shard.offsets, tuple(shard.tensor.shape)) for key, shard in state.items()}
            wrong = [key for key, box in boxes.items() if not torch.equal(state[key].tensor, narrow(full[key], box))]
            engine.publish()
            loss = engine.train_step(2).loss
            landed.append(Landed(target.name, source, boxes, wrong, loss, dict(restored.bytes_read)))
    return landed


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


class LoggedSamples(OneByOne):
    """1,000 sequences of random tokens, a function of their number; notes which were taken."""

    def __init__(self, job: Job) -> None:
        self.sequence_length = job.data.sequence_length
        self.taken: list[int] = []
        self._vocabulary = job.model.vocab_size

    def __len__(self) -> int:
        return 1000

    def sample(self, index: int) -> Sample:
        self.taken.append(index)
        return sample_of(np.random.default_rng(index).integers(0, self._vocabulary, self.sequence_length + 1))


def batches_of(job: Job) -> tuple[StepBatches, LoggedSamples]:
    samples = LoggedSamples(job)
    return StepBatches(samples, SampleOrder(len(samples), job.seed), job.training), samples


def train_and_save(rank: int, job: Job, layout: Layout, steps: int, folder: Path) -> None:
    engine = Engine(job, layout, rank, batches_of(job)[0])
    engine.initialize()
    for step in range(1, steps + 1):
        engine.train_step(step)
    write_image(engine, rank, steps, folder)


@dataclass(frozen=True)
class Resumed:
    """What a rank has from a checkpoint, and the samples it took in the two steps after it."""

    shards: dict[str, tuple[Box, npt.NDArray[np.float32]]]
    bytes_read: dict[str, int]
    samples: list[int]


def resume(rank: int, job: Job, layout: Layout, uris: list[str], checkpoint: CheckpointId) -> list[Resumed]:
    """From the checkpoint in each of the job folders ``uris``; the next step is the one after the manifest's."""
    results = []
    for uri in uris:
        batches, samples = batches_of(job)
        engine = Engine(job, layout, rank, batches)
        store = Store.open(uri)
        manifest = read_manifest(store, checkpoint)
        assert manifest.cursor == manifest.step * job.training.global_batch
        restored = restore(engine.state(), parts_of(store, manifest), rank=rank, expected_keys=state_keys(job))
        shards = {
            key: (Box(shard.offsets, tuple(shard.tensor.shape)), shard.tensor.detach().numpy().copy())
            for key, shard in engine.state().items()
        }
        engine.publish()
        for step in (manifest.step + 1, manifest.step + 2):
            engine.train_step(step)
        results.append(Resumed(shards, dict(restored.bytes_read), samples.taken))
    return results


def train_with_seeds(rank: int, job: Job, layout: Layout, seed: int) -> tuple[bool, bytes]:
    """Whether three steps left all generators of random numbers as they were; and the state after them."""
    engine = Engine(job, layout, rank, SyntheticBatches(job))
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    engine.initialize()
    before = _generators()
    for step in (1, 2, 3):
        engine.train_step(step)
    state = b"".join(shard.tensor.detach().numpy().tobytes() for shard in engine.state().values())
    return before == _generators(), state


def _generators() -> tuple[bytes, bytes, object]:
    numbers: Any = np.random.get_state(legacy=False)
    place = numbers["state"]["key"].tobytes() + str(numbers["state"]["pos"]).encode()
    return torch.get_rng_state().numpy().tobytes(), place, random.getstate()
