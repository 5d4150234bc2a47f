from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.job import DataConfig, Job, ModelConfig, TrainingConfig
from elastic_train.config.layout import Layout
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank
from tests.training.synthetic import small_job


def problems(layout: Layout, *, slots: int = 8, sequence: int = 32, **model: Any) -> list[str]:
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
    assert problems(Layout(cp=2)) == ["cp=2 is not available; use cp=1"]


def test_ddp_shards_nothing() -> None:
    job = small_job(parallel={"data": "ddp"})
    assert check_layout(job, Layout(dp_replicate=2)) == []
    assert check_layout(job, Layout(dp_shard=2)) == [
        "dp_shard=2 must be 1 with data=ddp, which shards nothing; use dp_replicate"
    ]


def test_fp8_needs_multiples_of_16() -> None:
    fp8 = {"training": {"precision": "fp8"}, "hosts": {"device": "cuda"}}
    assert check_layout(small_job(**fp8), Layout(tp=2)) == []
    odd = small_job(**fp8, model={"intermediate_size": 120}, data={"sequence_length": 30})
    assert check_layout(odd, Layout(tp=2)) == [
        "intermediate_size=120 over 2 ranks is not a multiple of 16, as precision=fp8 needs",
        "micro_batch x sequence_length=30 is not a multiple of 16, as precision=fp8 needs",
    ]


@pytest.mark.parametrize(("slots", "ranks", "expected"), [(8, 1, 8), (8, 3, 3), (8, 8, 1), (9, 8, 2)])
def test_micro_batches_per_rank(slots: int, ranks: int, expected: int) -> None:
    assert micro_batches_per_rank(slots, ranks) == expected
