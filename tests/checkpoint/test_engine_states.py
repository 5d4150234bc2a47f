from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.description import incomplete_keys, shapes_of
from elastic_train.checkpoint.image import adoptable
from elastic_train.checkpoint.reader import restore
from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.parallel.shard import LocalShard
from tests.checkpoint.engine_ranks import move
from tests.checkpoint.states import image_parts
from tests.ranks import run_ranks

MODEL = ModelConfig(
    hidden_size=20,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=34,
    vocab_size=50,
)
JOB = Job(
    name="states",
    model=MODEL,
    data=DataConfig(uri="unused", sequence_length=8),
    training=TrainingConfig(steps=3, global_batch=4),
)
LAYOUTS = [
    Layout(dp_shard=3),
    Layout(pp=2, dp_shard=2),
    Layout(dp_shard=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(pp=3),
    Layout(),
]
TIED = JOB.model_copy(update={"model": MODEL.model_copy(update={"tie_word_embeddings": True})})


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """The global tensors that the images in ``folder`` hold together."""
    images = adoptable(folder)
    shapes = shapes_of(image.description for image in images)
    assert incomplete_keys([image.description for image in images], shapes) == []
    state = {key: LocalShard(torch.full(shape, torch.nan), shape, (0,) * len(shape)) for key, shape in shapes.items()}
    restore(state, image_parts([image.path for image in images], 1))
    return {key: shard.tensor for key, shard in state.items()}


@pytest.mark.parametrize(
    ("job", "layouts", "weights"),
    [
        (JOB, LAYOUTS, 1 + 9 * 3 + 1 + 1),
        # Two pipeline ranks hold the embedding.
        (TIED, [Layout(pp=3), Layout(dp_shard=2, tp=2), Layout(pp=2, dp_shard=2), Layout()], 1 + 9 * 3 + 1),
    ],
    ids=["untied", "tied"],
)
def test_the_engines_state_moves_through_layouts_bit_for_bit(
    tmp_path: Path, job: Job, layouts: list[Layout], weights: int
) -> None:
    """20 rows over 3 ranks, 50 over 3, 34 over 2 x 2, empty shards of the norms among them."""
    folders = [tmp_path / str(number) for number in range(len(layouts))]
    for number, layout in enumerate(layouts):
        folders[number].mkdir()
        run_ranks(move, layout.world_size, job, layout, folders[number - 1] if number else None, folders[number])
    first = whole(folders[0])
    assert len(first) == 3 * weights
    assert all(first[key].any() for key in first)  # the trained moments are not zero
    for folder in folders[1:]:
        held = whole(folder)
        assert held.keys() == first.keys()
        assert all(torch.equal(held[key], first[key]) for key in first)
