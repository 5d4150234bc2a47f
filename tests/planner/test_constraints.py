from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.job import DataConfig, Job, ModelConfig, ParallelConfig, TrainingConfig
from elastic_train.config.layout import Layout
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank


def problems(layout: Layout, *, slots: int = 8, sequence: int = 32, context: Any = "gather", **model: Any) -> list[str]:
    shape = {
        "hidden_size": 480,
        "num_hidden_layers": 4,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 128,
        "vocab_size": 1003,
    }
    job = Job(
        name="x",
        model=ModelConfig(**shape | model),
        training=TrainingConfig(steps=1, global_batch=2 * slots, micro_batch=2),
        data=DataConfig(uri="x", sequence_length=sequence),
        parallel=ParallelConfig(context=context),
    )
    return check_layout(job, layout)


def test_all_violations_are_listed_with_both_numbers() -> None:
    assert problems(Layout(pp=5, dp_shard=3, tp=3)) == [
        "num_attention_heads=40 is not divisible by tp=3",
        "num_key_value_heads=8 is not divisible by tp=3",
        "intermediate_size=128 is not divisible by tp=3",
        "sequence_length=32 is not divisible by tp=3",
        "3 micro-batches per data rank (8 slots over 3) are fewer than pp=5; "
        "the 1F1B schedule needs at least one per stage",
        "num_hidden_layers=4 is smaller than pp=5",
    ]


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(pp=4, dp_shard=2, tp=8), Layout(dp_replicate=4, dp_shard=2), Layout(dp_shard=5)],
    ids=str,
)
def test_layouts_that_can_run(layout: Layout) -> None:
    """Neither the vocabulary nor the number of slots has to divide."""
    assert problems(layout) == []


def test_more_data_ranks_than_slots() -> None:
    assert problems(Layout(dp_replicate=3, dp_shard=3)) == [
        "9 data ranks (dp_replicate=3 x dp_shard=3) exceed the 8 slots of global_batch=16 / micro_batch=2"
    ]


def test_what_is_not_there_yet() -> None:
    assert problems(Layout(pp=2), tie_word_embeddings=True) == [
        "tie_word_embeddings=true is not available with pp=2; use pp=1"
    ]
    assert problems(Layout(tp=2), tie_word_embeddings=True) == []


def test_context_by_gathering_needs_two_chunks_per_rank() -> None:
    assert problems(Layout(cp=3)) == ["sequence_length=32 is not divisible by 2 x cp=6, the chunks of context=gather"]
    assert problems(Layout(cp=2, tp=8), sequence=24) == ["sequence_length=24 is not divisible by cp x tp=16"]
    assert problems(Layout(cp=16)) == problems(Layout(cp=4, tp=8)) == []


@pytest.mark.parametrize(("layout", "most"), [(Layout(cp=16), 8), (Layout(cp=4, tp=4), 2)], ids=str)
def test_context_by_heads_needs_heads_of_each_kind(layout: Layout, most: int) -> None:
    """All at once, with the cp that would do; gathering takes any number of heads."""
    reason = (
        f"tp x cp=16, as context=ulysses needs; the largest cp that would do is {most}, and context=gather takes any"
    )
    assert problems(layout, context="ulysses", sequence=24) == [
        *(["sequence_length=24 is not divisible by cp=16, the chunks of context=ulysses"] if layout.cp == 16 else []),
        *(["sequence_length=24 is not divisible by cp x tp=16"] if layout.tp > 1 else []),
        f"num_attention_heads=40 is not divisible by {reason}",
        f"num_key_value_heads=8 is not divisible by {reason}",
    ]
    assert problems(Layout(cp=most, tp=layout.tp), context="ulysses") == []
    assert problems(layout) == []


@pytest.mark.parametrize(("slots", "ranks", "expected"), [(8, 1, 8), (8, 3, 3), (8, 8, 1), (9, 8, 2)])
def test_micro_batches_per_rank(slots: int, ranks: int, expected: int) -> None:
    assert micro_batches_per_rank(slots, ranks) == expected
