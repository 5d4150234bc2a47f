"""Live: engines on gloo ranks save their state, engines of other layouts and strategies take it and go on."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.capture import dtype_of
from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.description import union_volume
from elastic_train.checkpoint.image import adoptable
from elastic_train.checkpoint.reader import restore
from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.parallel.shard import LocalShard
from elastic_train.storage.store import Store
from elastic_train.training.state_keys import state_keys
from tests.checkpoint.engine_ranks import (
    Landed,
    Resumed,
    Setup,
    batches_of,
    narrow,
    restore_all,
    resume,
    save_all,
    train_and_save,
    train_with_seeds,
)
from tests.checkpoint.states import first_claim, image_parts, upload_images
from tests.ranks import run_ranks

MODEL = ModelConfig(
    hidden_size=20,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=34,
    vocab_size=51,
)
JOB = Job(
    name="states",
    model=MODEL,
    data=DataConfig(uri="unused", sequence_length=8),
    training=TrainingConfig(steps=9, global_batch=8),
)


def setup(name: str, job: Job, *, data: str = "zero3", **axes: int) -> Setup:
    parallel = ParallelConfig.model_validate({"data": data, "pipeline": "gpipe"})
    return Setup(name, job.model_copy(update={"parallel": parallel}), Layout(**axes))


def changed(**parts: Any) -> Job:
    return JOB.model_copy(update=parts)


BF16 = changed(training=JOB.training.model_copy(update={"precision": "bf16"}))
FIRST = [
    setup("single", JOB),
    setup("dp3", JOB, dp_shard=3),
    setup("dp8", JOB, dp_shard=8),  # 20 elements of a norm over 8 ranks: the last one has none
    setup("zero1-dp2-tp2", JOB, data="zero1", dp_shard=2, tp=2),
    setup("zero2-pp2-dp3", JOB, data="zero2", pp=2, dp_shard=3),
    setup("ddp4", JOB, data="ddp", dp_replicate=4),
    setup("hsdp2x2", JOB, data="hsdp", dp_replicate=2, dp_shard=2),
    setup("dp2-cp2", JOB, dp_shard=2, cp=2),
    setup("bf16-pp2-dp2", BF16, pp=2, dp_shard=2),
    setup("bf16-zero1-dp3", BF16, data="zero1", dp_shard=3),
    setup("pp3-tp2", JOB, pp=3, tp=2),
]
"""One kind of state, AdamW's: of these each restores from each."""
TIED_MUON = changed(
    model=MODEL.model_copy(update={"tie_word_embeddings": True}),
    optimizer=OptimizerConfig.model_validate({"name": "muon"}),
    training=JOB.training.model_copy(update={"ema_decay": 0.9}),
)
SECOND = [
    setup("muon", TIED_MUON),
    setup("muon-pp3", TIED_MUON, pp=3),
    setup("muon-dp2-tp2", TIED_MUON, dp_shard=2, tp=2),
    setup("muon-hsdp2x4", TIED_MUON, data="hsdp", dp_replicate=2, dp_shard=4),
    setup("muon-zero2-dp3", TIED_MUON, data="zero2", dp_shard=3),
]
"""Muon's state, averaged weights, and an embedding that two pipeline ranks hold."""
MOMENTUM = changed(optimizer=OptimizerConfig.model_validate({"name": "sgd", "momentum": 0.9}))
THIRD = [
    setup("sgd-dp2", MOMENTUM, dp_shard=2),
    setup("sgd-ddp2-pp2", MOMENTUM, data="ddp", dp_replicate=2, pp=2),
    setup("sgd-tp2", MOMENTUM, tp=2),
]
ADAPTED = changed(init_from="unused", lora=LoraConfig(rank=3, target_modules="all-linear"), training=BF16.training)
FOURTH = [
    setup("bf16-lora", ADAPTED),
    setup("bf16-lora-dp3", ADAPTED, dp_shard=3),
    setup("bf16-lora-zero1-dp2-tp2", ADAPTED, data="zero1", dp_shard=2, tp=2),
    setup("bf16-lora-pp3", ADAPTED, pp=3),
]
"""Frozen weights in bf16, adapters and their moments in float32."""
FAMILIES = [FIRST, SECOND, THIRD, FOURTH]


def by_ranks(setups: list[Setup]) -> dict[int, list[Setup]]:
    """World size -> those of that size; one group of ranks serves all of them."""
    ordered = sorted(setups, key=lambda setup: setup.layout.world_size)
    return {size: list(group) for size, group in itertools.groupby(ordered, lambda setup: setup.layout.world_size)}


def whole(folder: Path, job: Job) -> dict[str, torch.Tensor]:
    """The global tensors that the images in ``folder`` hold together."""
    images = adoptable(folder)
    chunks = {chunk.key: chunk for image in images for chunk in image.description.chunks}
    assert chunks.keys() == state_keys(job)
    state = {
        key: LocalShard(
            torch.full(c.global_shape, torch.nan, dtype=dtype_of(c.dtype)), c.global_shape, (0,) * len(c.sizes)
        )
        for key, c in chunks.items()
    }
    restore(state, image_parts([image.path for image in images], images[0].step))
    return {key: shard.tensor for key, shard in state.items()}


def check(ranks: tuple[Landed, ...], full: dict[str, torch.Tensor], loss: float, tolerance: float) -> None:
    """All ranks of one target, after one source: each shard is right, together they are everything."""
    assert [landed.wrong for landed in ranks] == [[]] * len(ranks)
    assert {key for landed in ranks for key in landed.boxes} == full.keys()
    for key, tensor in full.items():
        boxes = [landed.boxes[key] for landed in ranks if key in landed.boxes]
        assert union_volume((box.offsets, box.sizes) for box in boxes if math.prod(box.sizes)) == tensor.numel()
    for landed in ranks:
        assert landed.loss == pytest.approx(loss, rel=tolerance)


@pytest.mark.slow
def test_engines_of_any_layout_take_the_state_of_any_other_and_go_on(tmp_path: Path) -> None:
    pairs = 0
    for family in FAMILIES:
        losses: dict[str, float] = {}
        for place in family:
            (tmp_path / place.name).mkdir()
        for world, places in by_ranks(family).items():
            losses |= run_ranks(save_all, world, places, tmp_path)[0]
        full = {place.name: whole(tmp_path / place.name, place.job) for place in family}
        for name, tensors in full.items():
            # The trained moments are not zero; B begins as zeros, and so do the gradients of A.
            assert all(tensor.any() for key, tensor in tensors.items() if not ("lora_A" in key and "exp_avg" in key))
            torch.save(tensors, tmp_path / f"{name}.pt")
        names = [place.name for place in family]
        for world, places in by_ranks(family).items():
            for ranks in zip(*run_ranks(restore_all, world, places, names, tmp_path), strict=True):
                source, target = ranks[0].source, ranks[0].target
                narrower = "bf16" in source + target
                check(ranks, full[source], losses[source], tolerance=2e-2 if narrower else 1e-4)
                pairs += 1
    assert pairs == sum(len(family) ** 2 for family in FAMILIES) == 171


@pytest.mark.slow
def test_checkpoints_of_1_2_and_4_data_ranks_load_into_each_and_the_samples_go_on(tmp_path: Path) -> None:
    """Saved at step 3 (CK-01): the 16 samples after it are those that follow in the order of the job, on any ranks."""
    layouts = {size: Layout(dp_shard=size) for size in (1, 2, 4)}
    full, manifests, uris = {}, {}, []
    for size, layout in layouts.items():
        images = tmp_path / f"images-{size}"
        images.mkdir()
        run_ranks(train_and_save, size, JOB, layout, 3, images)
        full[size] = whole(images, JOB)
        store = Store.open(str(tmp_path / f"job-{size}"))
        manifests[size] = upload_images(store, sorted(images.glob("*.img")), 3)
        assert commit(store, manifests[size], first_claim(store)).created
        uris.append(store.uri)
    batches, _ = batches_of(JOB)
    following = batches.sample_ids(4) + batches.sample_ids(5)
    for size, layout in layouts.items():
        results: list[list[Resumed]] = run_ranks(resume, size, JOB, layout, uris, manifests[size].id)
        for source, ranks in zip(layouts, zip(*results, strict=True), strict=True):
            assert sorted(sample for rank in ranks for sample in rank.samples) == sorted(following)
            gathered = {key: np.full(tensor.shape, np.nan, np.float32) for key, tensor in full[source].items()}
            for rank in ranks:
                assert set(rank.bytes_read) == {"object"}
                for key, (box, values) in rank.shards.items():
                    narrow(torch.from_numpy(gathered[key]), box).copy_(torch.from_numpy(values))
            assert all(np.array_equal(gathered[key], full[source][key].numpy()) for key in full[source])


@pytest.mark.slow
@pytest.mark.parametrize("job", [JOB, TIED_MUON], ids=["adamw", "muon"])
def test_training_draws_no_random_numbers_so_there_is_no_random_state_to_save(job: Job) -> None:
    """What a step does is a function of weights, moments, step and samples; the step says which samples."""
    first, second = (run_ranks(train_with_seeds, 2, job, Layout(dp_shard=2), seed) for seed in (1, 2))
    assert all(untouched for untouched, _ in [*first, *second])
    assert [state for _, state in first] == [state for _, state in second]
