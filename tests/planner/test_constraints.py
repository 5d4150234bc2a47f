from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.planner.constraints import check_layout, micro_batches_per_rank
from tests.training.synthetic import small_job


def problems(
    layout: Layout,
    *,
    slots: int = 8,
    sequence: int = 32,
    parallel: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **model: Any,
) -> list[str]:
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
        training=TrainingConfig(steps=1, global_batch=2 * slots, micro_batch=2, **training or {}),
        parallel=ParallelConfig.model_validate(parallel or {}),
        data=DataConfig(uri="x", sequence_length=sequence),
    )
    return check_layout(job, layout)


def test_all_violations_are_listed_with_both_numbers() -> None:
    assert problems(Layout(pp=5, dp_shard=3, tp=3)) == [
        "num_attention_heads=40 is not divisible by tp=3 (largest tp of this model: 8)",
        "num_key_value_heads=8 is not divisible by tp=3 (largest tp of this model: 8)",
        "intermediate_size=128 is not divisible by tp=3 (largest tp of this model: 8)",
        "sequence_length=32 is not divisible by tp=3 (largest tp of this model: 8)",
        "3 micro-batches per data rank (8 slots over 3) are fewer than pp=5; "
        "pipeline=1f1b needs at least one per rank, gpipe does not",
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


def test_every_tensor_rank_has_tokens() -> None:
    """Cut as torch.chunk cuts: 9 over 8 are two a rank, and none for three of them."""
    assert problems(Layout(tp=8)) == problems(Layout(tp=8), vocab_size=64) == []
    assert problems(Layout(tp=8), vocab_size=9) == [
        "vocab_size=9 over tp=8 is 2 tokens a rank, and none for the last one"
    ]


def test_more_data_ranks_than_slots() -> None:
    assert problems(Layout(dp_replicate=3, dp_shard=3)) == [
        "9 data ranks (dp_replicate=3 x dp_shard=3) exceed the 8 slots of global_batch=16 / micro_batch=2"
    ]


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
    assert problems(layout, parallel={"context": "ulysses"}, sequence=24) == [
        *(["sequence_length=24 is not divisible by cp=16, the chunks of context=ulysses"] if layout.cp == 16 else []),
        *(["sequence_length=24 is not divisible by cp x tp=16"] if layout.tp > 1 else []),
        f"num_attention_heads=40 is not divisible by {reason}",
        f"num_key_value_heads=8 is not divisible by {reason}",
    ]
    assert problems(Layout(cp=most, tp=layout.tp), parallel={"context": "ulysses"}) == []
    assert problems(layout) == []


def test_largest_tp_is_named() -> None:  # HF-08
    assert problems(Layout(tp=4), num_key_value_heads=2) == [
        "num_key_value_heads=2 is not divisible by tp=4 (largest tp of this model: 2)"
    ]


@pytest.mark.parametrize("pipeline", ["1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_fewer_micro_batches_than_ranks(pipeline: str) -> None:  # PP-01
    (problem,) = problems(Layout(pp=4), slots=1, num_hidden_layers=8, parallel={"pipeline": pipeline})
    assert problem.startswith("1 micro-batches per data rank (1 slots over 1) are fewer than pp=4")
    assert problems(Layout(pp=4), slots=1, parallel={"pipeline": "gpipe"}) == []


@pytest.mark.parametrize("pipeline", ["interleaved_1f1b", "zero_bubble"])
def test_interleaved_schedules_get_equal_rounds(pipeline: str) -> None:  # PP-03
    def run(slots: int, pipeline: str) -> int:
        job = small_job(training={"global_batch": slots}, parallel={"pipeline": pipeline})
        return micro_batches_per_rank(job, Layout(pp=4))

    assert [run(slots, pipeline) for slots in range(4, 14)] == [4, 5, 6, 7, 8, 10, 10, 12, 12, 15]
    assert [run(slots, "1f1b") for slots in range(4, 14)] == list(range(4, 14))


def test_layers_of_virtual_stages() -> None:  # PP-08
    assert problems(Layout(pp=4), parallel={"pipeline": "zbv"}) == [
        "num_hidden_layers=4 is smaller than pp=4 x 2 stages per rank of zbv = 8"
    ]
    assert problems(Layout(pp=2), parallel={"pipeline": "interleaved_1f1b", "virtual_stages": 3}) == [
        "num_hidden_layers=4 is smaller than pp=2 x 3 stages per rank of interleaved_1f1b = 6"
    ]


def test_tied_embeddings_go_with_every_schedule_but_zbv() -> None:
    for pipeline in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"):
        assert problems(Layout(pp=2, tp=2), tie_word_embeddings=True, parallel={"pipeline": pipeline}) == []
    (problem,) = problems(Layout(pp=2), tie_word_embeddings=True, parallel={"pipeline": "zbv"})
    assert problem.startswith("tie_word_embeddings=true is not available with pipeline=zbv and pp=2")
    assert problems(Layout(), tie_word_embeddings=True, parallel={"pipeline": "zbv"}) == []


@pytest.mark.parametrize("pipeline", ["zero_bubble", "zbv"])
def test_adapters_leave_nothing_to_put_off(pipeline: str) -> None:
    job = small_job(lora={}, parallel={"pipeline": pipeline})
    (problem,) = check_layout(job, Layout(pp=2))
    assert problem.startswith(f"pipeline={pipeline} with pp=2 is not available with lora: ")
    assert check_layout(job, Layout()) == []


@pytest.mark.parametrize("pipeline", ["zero_bubble", "zbv"])
def test_what_a_split_backward_pass_excludes(pipeline: str) -> None:
    parallel = {"pipeline": pipeline, "reshard_after_forward": True}
    training = {"compile": True, "recompute": "full"}
    found = problems(Layout(pp=2), parallel=parallel, training=training)
    fields = [problem.split(" is not")[0] for problem in found]
    assert fields == ["reshard_after_forward=true", "compile=true", "recompute=full"]
    assert problems(Layout(dp_shard=2), parallel=parallel, training=training) == []


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
    assert micro_batches_per_rank(small_job(training={"global_batch": slots}), Layout(dp_shard=ranks)) == expected


@pytest.mark.parametrize("pipeline", ["zero_bubble", "zbv"])
def test_exact_refuses_a_backward_pass_in_two_pieces(pipeline: str) -> None:
    job = small_job(training={"determinism": "exact"}, parallel={"pipeline": pipeline})
    assert check_layout(job, Layout()) == []
    assert check_layout(job, Layout(pp=2)) == [
        f"pipeline={pipeline} with pp=2 is not available with determinism=exact, which needs every backward pass in "
        "one piece; use gpipe, 1f1b or interleaved_1f1b"
    ]
