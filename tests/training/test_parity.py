"""Every strategy, alone and combined, against one process with the same global batch.

Three steps of each row of the tables: loss, pre-clip gradient norm and every parameter's gathered gradient to 1e-5
relative (of the tensor's largest element), initial weights bit for bit. Layouts of up to 8 ranks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from elastic_train.config.layout import Layout
from tests.training.runs import Run, assert_same_steps, run
from tests.training.synthetic import small_job

STEPS = 3

FAMILIES: dict[str, dict[str, Any]] = {
    # Micro-batches of one sample, labels partly masked, a clipping that acts.
    "plain": {"job": {"optimizer": {"clip_norm": 0.5}}, "data": {"masked": 0.6}},
    # 16 slots: several micro-batches per rank whatever the layout.
    "accumulated": {"job": {"training": {"global_batch": 16}}, "data": {"masked": 0.6}},
    # The second half of the batch has no valid token: half of the data ranks have nothing to learn from.
    "silent": {"job": {}, "data": {"empty_rows": (4, 5, 6, 7)}},
    # Sequences of several documents each, with masks between them.
    "packed": {"job": {"data": {"document_mask": True}}, "data": {"masked": 0.3, "below": 12}},
    "tied": {"job": {"model": {"tie_word_embeddings": True, "vocab_size": 131}}, "data": {"masked": 0.6}},
    "biased": {"job": {"model": {"qkv_bias": True}}, "data": {"masked": 0.6}},
    # Sizes that 2, 3, 4 or 8 do not divide.
    "odd": {
        "job": {
            "model": {
                "hidden_size": 90,
                "num_hidden_layers": 5,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "intermediate_size": 111,
                "vocab_size": 1003,
            },
            "data": {"sequence_length": 36},
        },
        "data": {"masked": 0.6},
    },
    # Eight layers, so that eight (virtual) stages have one each.
    "deep": {"job": {"model": {"num_hidden_layers": 8}}, "data": {"masked": 0.6}},
}

ALONE: list[tuple[str, dict[str, Any], Layout]] = [
    ("plain", {"data": "ddp"}, Layout(dp_replicate=4)),
    ("plain", {"data": "zero1"}, Layout(dp_shard=4)),
    ("plain", {"data": "zero2"}, Layout(dp_shard=4)),
    ("plain", {"data": "zero3"}, Layout(dp_shard=4)),
    ("plain", {"data": "zero3", "reshard_after_forward": True, "prefetch": 0}, Layout(dp_shard=4)),
    ("plain", {"data": "zero3", "reshard_after_forward": True, "prefetch": 2}, Layout(dp_shard=4)),
    ("plain", {"data": "hsdp"}, Layout(dp_replicate=2, dp_shard=2)),
    ("plain", {}, Layout(tp=2)),
    ("plain", {"pipeline": "gpipe"}, Layout(pp=4)),
    ("plain", {"pipeline": "1f1b"}, Layout(pp=4)),
    ("deep", {"pipeline": "interleaved_1f1b"}, Layout(pp=4)),
    ("deep", {"pipeline": "zero_bubble"}, Layout(pp=4)),
    ("deep", {"pipeline": "zbv"}, Layout(pp=4)),
    ("plain", {"context": "gather"}, Layout(cp=4)),
    ("plain", {"context": "ulysses"}, Layout(cp=2)),
    ("plain", {"training": {"recompute": "full"}}, Layout()),
    ("plain", {"training": {"recompute": "selective"}}, Layout()),
]

COMBINED: list[tuple[str, dict[str, Any], Layout]] = [
    # Two axes.
    ("plain", {"data": "ddp"}, Layout(dp_replicate=3)),
    ("plain", {"data": "zero1"}, Layout(dp_replicate=2, dp_shard=3)),
    ("odd", {"data": "zero2"}, Layout(dp_shard=4, tp=1)),
    ("plain", {"data": "ddp"}, Layout(dp_replicate=2, tp=2)),
    ("silent", {"data": "zero1"}, Layout(dp_shard=2, tp=2)),
    ("silent", {"data": "zero2"}, Layout(dp_shard=2, tp=2)),
    ("odd", {"data": "zero3"}, Layout(dp_shard=2, tp=3)),
    ("accumulated", {"data": "ddp"}, Layout(pp=2, dp_replicate=2)),
    ("accumulated", {"data": "zero1"}, Layout(pp=2, dp_shard=2)),
    ("accumulated", {"data": "zero2"}, Layout(pp=2, dp_shard=3)),
    ("accumulated", {"data": "zero3", "reshard_after_forward": True}, Layout(pp=2, dp_shard=3)),
    ("accumulated", {"data": "hsdp"}, Layout(pp=2, dp_replicate=2, dp_shard=2)),
    ("odd", {"pipeline": "gpipe"}, Layout(pp=2, tp=3)),
    ("deep", {"pipeline": "interleaved_1f1b", "data": "zero3"}, Layout(pp=2, dp_shard=2)),
    ("deep", {"pipeline": "zero_bubble", "data": "zero2"}, Layout(pp=2, dp_shard=2)),
    ("deep", {"pipeline": "zbv", "data": "zero3"}, Layout(pp=2, dp_shard=2)),
    ("deep", {"pipeline": "zbv", "data": "zero2"}, Layout(pp=2, dp_shard=2)),
    ("deep", {"pipeline": "interleaved_1f1b", "virtual_stages": 4}, Layout(pp=2, tp=2)),
    ("plain", {"context": "gather", "data": "zero3"}, Layout(dp_shard=2, cp=2)),
    ("plain", {"context": "gather", "data": "ddp"}, Layout(dp_replicate=2, cp=2)),
    ("silent", {"context": "ulysses", "data": "zero2"}, Layout(dp_shard=2, cp=2)),
    ("odd", {"context": "gather"}, Layout(cp=2, tp=3)),
    ("accumulated", {"context": "gather"}, Layout(pp=2, cp=2)),
    ("accumulated", {"context": "ulysses"}, Layout(pp=2, cp=2)),
    # Packed documents.
    ("packed", {"data": "zero3"}, Layout(dp_shard=3)),
    ("packed", {}, Layout(pp=2, tp=2)),
    ("packed", {"context": "gather"}, Layout(dp_shard=2, cp=2, tp=2)),
    ("packed", {"context": "ulysses"}, Layout(pp=2, dp_shard=2, cp=2)),
    ("packed", {"context": "gather", "training": {"recompute": "selective"}}, Layout(cp=4)),
    # Tied embeddings.
    ("tied", {"data": "zero3"}, Layout(pp=2, dp_shard=3)),
    ("tied", {"data": "zero1"}, Layout(pp=2, dp_shard=2, tp=2)),
    ("tied", {"pipeline": "interleaved_1f1b"}, Layout(pp=2, dp_shard=2)),
    ("tied", {"data": "ddp", "context": "gather"}, Layout(dp_replicate=2, cp=2, tp=2)),
    # Biases.
    ("biased", {"data": "zero3"}, Layout(dp_shard=3)),
    ("biased", {"data": "zero1"}, Layout(pp=2, dp_shard=2, tp=2)),
    # Everything at once, and what is computed anew.
    ("accumulated", {"data": "hsdp"}, Layout(dp_replicate=2, dp_shard=2, tp=2)),
    ("accumulated", {"data": "zero3"}, Layout(pp=2, dp_shard=2, tp=2)),
    ("accumulated", {"data": "zero2", "context": "gather"}, Layout(dp_shard=2, cp=2, tp=2)),
    ("accumulated", {"training": {"recompute": "full"}}, Layout(pp=2, dp_shard=2, cp=2)),
    (
        "packed",
        {"training": {"recompute": "full"}, "data": "zero3", "reshard_after_forward": True},
        Layout(dp_shard=4, tp=2),
    ),
    ("odd", {"training": {"recompute": "selective"}, "data": "zero2"}, Layout(pp=2, dp_shard=2)),
    ("deep", {"training": {"recompute": "full"}, "pipeline": "interleaved_1f1b"}, Layout(pp=2, dp_shard=2, tp=2)),
]


def test_the_table_is_as_large_as_it_says() -> None:
    assert len(COMBINED) >= 30
    assert max(layout.world_size for _, _, layout in ALONE + COMBINED) == 8


@lru_cache
def truth(family: str) -> Run:
    return _run(family, {}, Layout())


def _run(family: str, settings: dict[str, Any], layout: Layout) -> Run:
    sections = {name: dict(fields) for name, fields in FAMILIES[family]["job"].items()}
    sections["parallel"] = {name: value for name, value in settings.items() if name != "training"}
    sections["training"] = sections.get("training", {}) | settings.get("training", {})
    return run(small_job(**sections), layout, STEPS, **FAMILIES[family]["data"])


@pytest.mark.parametrize(("family", "settings", "layout"), ALONE, ids=str)
def test_alone(family: str, settings: dict[str, Any], layout: Layout) -> None:
    compare(_run(family, settings, layout), truth(family))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings", "layout"), COMBINED, ids=str)
def test_combined(family: str, settings: dict[str, Any], layout: Layout) -> None:
    compare(_run(family, settings, layout), truth(family))


def compare(actual: Run, expected: Run) -> None:
    assert actual.before.keys() == expected.before.keys()
    for name, value in expected.before.items():
        np.testing.assert_array_equal(actual.before[name], value, err_msg=name)
    assert_same_steps(actual, expected)
