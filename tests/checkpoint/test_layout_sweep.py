"""Any layout to any layout: all 1,444 ordered pairs of the 38 layouts (pp, dp, tp) of up to 8 ranks, bit for bit.

Planning and reading are per rank and need no process group, so ranks are simulated: each restores its own boxes from
the images of all ranks of the other layout. That these are the boxes of real ranks is tested against the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_train.checkpoint.capture import describe
from elastic_train.checkpoint.reader import Part, restore
from elastic_train.checkpoint.sources import ImageSource
from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.parallel.shard import Box, LocalShard
from elastic_train.planner.constraints import check_layout
from elastic_train.training.engine import Engine
from elastic_train.training.state_keys import state_keys
from tests.checkpoint.partitions import layouts_up_to, partition, shapes
from tests.checkpoint.states import State, write_images
from tests.training.synthetic import SyntheticBatches

LAYOUTS = layouts_up_to(8)
ODD = Job(
    name="odd",
    model=ModelConfig(
        hidden_size=90,
        num_hidden_layers=5,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=243,
        vocab_size=1003,
    ),
    data=DataConfig(uri="unused", sequence_length=81),
    training=TrainingConfig(steps=3, global_batch=8),
)
"""Sizes that divide nothing. The engine runs it with tp of 1 and 3 and pp of up to 5, and refuses the other layouts;
their boxes, with heads cut anywhere and stages without layers, are harder than any that are legal."""
EVEN = ODD.model_copy(
    update={
        "model": ODD.model.model_copy(
            update={
                "hidden_size": 18,
                "num_hidden_layers": 8,
                "num_attention_heads": 840,
                "num_key_value_heads": 840,
                "head_dim": 2,
                "intermediate_size": 840,
            }
        ),
        "data": DataConfig(uri="unused", sequence_length=840),
    }
)
"""Legal with all 38 layouts: 840 heads over 1 to 8 tensor ranks, 8 layers. Vocabulary and hidden size are uneven."""


def test_there_are_38_layouts_and_1444_pairs() -> None:
    """As many as there are ordered factorisations in three factors of 1 to 8: 1 + 3 + 3 + 6 + 3 + 9 + 3 + 10."""
    assert len(LAYOUTS) == len({str(layout) for layout in LAYOUTS}) == 38
    assert len(LAYOUTS) ** 2 == 1444
    assert sum(layout.world_size for layout in LAYOUTS) == 1 + 6 + 9 + 24 + 15 + 54 + 21 + 80
    assert full_state().keys() == state_keys(ODD)


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """A process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def boxes_of_engine(job: Job, layout: Layout, rank: int) -> dict[str, Box]:
    with fake_group(rank, layout.world_size):
        state = Engine(job, layout, rank, SyntheticBatches(job)).state()
    return {key: Box(shard.offsets, tuple(shard.tensor.shape)) for key, shard in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_boxes_are_those_of_the_engine(layout: Layout) -> None:
    assert check_layout(EVEN, layout) == []
    jobs = [EVEN, ODD] if not check_layout(ODD, layout) else [EVEN]
    for job in jobs:
        for rank in range(layout.world_size):
            assert boxes_of_engine(job, layout, rank) == partition(job, layout, rank)


def test_what_the_engine_cannot_run_is_refused_with_both_numbers() -> None:
    legal = [layout for layout in LAYOUTS if not check_layout(ODD, layout)]
    assert legal == [layout for layout in LAYOUTS if layout.tp in (1, 3) and layout.pp <= 5]
    assert len(legal) == 20
    problems = check_layout(ODD, Layout(pp=6)) + check_layout(ODD, Layout(tp=2))
    assert problems[0] == "num_hidden_layers=5 is smaller than pp=6"
    assert problems[1] == "num_attention_heads=9 is not divisible by tp=2 (largest tp of this model: 3)"


@cache
def full_state() -> dict[str, torch.Tensor]:
    """Parameters and both moments, no value of which is zero."""
    generator = torch.Generator().manual_seed(4)
    return {key: torch.rand(shape, generator=generator) + 0.5 for key, shape in shapes(ODD).items()}


@cache
def gathered_state() -> dict[str, torch.Tensor]:
    return {key: torch.empty_like(tensor) for key, tensor in full_state().items()}


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@cache
def partitions(layout: Layout) -> list[dict[str, Box]]:
    return [partition(ODD, layout, rank) for rank in range(layout.world_size)]


def cut_state(boxes: dict[str, Box]) -> State:
    """A rank's part of the full state, in memory of its own."""
    full = full_state()
    return {
        key: LocalShard(narrow(full[key], box).clone(), tuple(full[key].shape), box.offsets)
        for key, box in boxes.items()
    }


@cache
def targets(layout: Layout) -> list[State]:
    return [cut_state(boxes) for boxes in partitions(layout)]


def saved(folder: Path, layout: Layout) -> list[Part]:
    """Real images of all ranks of ``layout``."""
    states = [cut_state(boxes) for boxes in partitions(layout)]
    paths = write_images(folder, states, step=3)
    return [Part(describe(state), ImageSource(path, 3)) for path, state in zip(paths, states, strict=True)]


def check(parts: list[Part], layout: Layout) -> None:
    """Every rank of ``layout`` restores; what all have together is the full state, bit for bit."""
    full, gathered = full_state(), gathered_state()
    for tensor in gathered.values():
        tensor.fill_(torch.nan)
    for rank, state in enumerate(targets(layout)):
        for shard in state.values():
            shard.tensor.fill_(-7.0)
        restored = restore(state, parts, rank=rank, expected_keys=full.keys())
        assert restored.passed_over == []
        assert restored.bytes_read.total() == sum(shard.tensor.nbytes for shard in state.values())
        for key, box in partitions(layout)[rank].items():
            narrow(gathered[key], box).copy_(state[key].tensor)
    assert {key for state in targets(layout) for key in state} == full.keys()
    wrong = [key for key, tensor in full.items() if not torch.equal(tensor, gathered[key])]
    assert wrong == []


@pytest.mark.parametrize("seed", range(8))
def test_some_pairs_of_layouts(seed: int, tmp_path: Path) -> None:
    source, *others = random.Random(seed).sample(LAYOUTS, 6)
    parts = saved(tmp_path, source)
    for layout in others:
        check(parts, layout)


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_restores_from_images_of(source: Layout, tmp_path: Path) -> None:
    parts = saved(tmp_path, source)
    for layout in LAYOUTS:
        check(parts, layout)
