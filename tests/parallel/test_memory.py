"""What a rank holds between two steps, to 1 % of the formula, and what it holds at most during one."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from tests.parallel.data_ranks import most_whole_gradients, most_whole_weights, persistent_bytes
from tests.ranks import run_ranks
from tests.training.synthetic import small_job

pytestmark = pytest.mark.slow

# Every dim 0 is a multiple of 12: parts of 2, 3 and 4 ranks are equal.
MODEL = {
    "hidden_size": 144,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "intermediate_size": 288,
    "vocab_size": 480,
}

BYTES = {
    # (whole, shared by N) bytes per parameter: weights and gradients + master and moments.
    ("bf16", "bf16"): {"ddp": (16, 0), "zero1": (4, 12), "zero2": (2, 14), "zero3": (0, 16)},
    ("bf16", "fp32"): {"ddp": (18, 0), "zero1": (6, 12), "zero2": (2, 16), "zero3": (0, 16)},
    ("fp32", "fp32"): {"ddp": (16, 0), "zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16)},
}


def job(
    data: str, precision: str = "bf16", reduce_dtype: str = "bf16", determinism: str = "default", **parallel: Any
) -> Job:
    return small_job(
        model=MODEL,
        training={"precision": precision, "reduce_dtype": reduce_dtype, "determinism": determinism},
        parallel={"data": data, **parallel},
    )


def layout_of(data: str, ranks: int) -> Layout:
    return Layout(dp_replicate=ranks) if data == "ddp" else Layout(dp_shard=ranks)


def check(ranks: int, *expected: tuple[Job, Layout, float]) -> None:
    """Bytes per parameter on every rank, of all runs in turn in the same processes."""
    runs = [(job, layout) for job, layout, _ in expected]
    for held in run_ranks(persistent_bytes, ranks, runs):
        for (job, layout, value), bytes_held in zip(expected, held, strict=True):
            training = job.training
            formats = training.precision, training.reduce_dtype, training.determinism
            case = f"{job.parallel.data} on {layout}, {', '.join(formats)}"
            assert bytes_held / job.model.num_parameters == pytest.approx(value, rel=0.01), case


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_persistent_bytes(ranks: int) -> None:
    """bf16 compute and reduction: 16P, 4P + 12P/N, 2P + 14P/N, 16P/N."""
    table = BYTES["bf16", "bf16"]
    check(ranks, *((job(data), layout_of(data, ranks), a + b / ranks) for data, (a, b) in table.items()))


def test_persistent_bytes_of_other_number_formats() -> None:
    check(
        2,
        *(
            (job(data, *formats), layout_of(data, 2), whole + shared / 2)
            for formats in (("bf16", "fp32"), ("fp32", "fp32"))
            for data, (whole, shared) in BYTES[formats].items()
        ),
    )


def test_exact_sums_take_eight_bytes_in_place_of_gradients() -> None:
    """Whole on every rank, however the rest is shared out."""
    values = {
        "fp32": {"ddp": (12, 0), "zero1": (4, 8), "zero2": (4, 8), "zero3": (0, 12)},
        "bf16": {"ddp": (14, 0), "zero1": (2, 12), "zero2": (2, 12), "zero3": (0, 12)},
    }
    for ranks in (2, 3):
        check(
            ranks,
            *(
                (job(data, precision, "fp32", determinism="exact"), layout_of(data, ranks), 8 + whole + shared / ranks)
                for precision, strategies in values.items()
                for data, (whole, shared) in strategies.items()
            ),
        )


def test_replicas_of_shards_hold_what_their_shard_group_shares() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    values = {"hsdp": 16 / 2, "zero1": 4 + 12 / 2, "zero2": 2 + 14 / 2}
    check(4, *((job(data), layout, value) for data, value in values.items()))


def test_one_rank_of_zero3_keeps_weights_and_gradients_beside_the_master() -> None:
    """Nothing to gather from, so weights are not cast anew in every step: 2P + 4P + 12P with float32 reduction."""
    check(1, (job("zero3", "bf16", "fp32"), Layout(), 18.0))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_zero3_gathers_a_few_blocks_at_a_time(depth: int) -> None:
    """The block in work, ``prefetch`` more, and what is outside the blocks."""
    deep = job("zero3", reshard_after_forward=True, prefetch=depth).model_dump()
    deep["model"]["num_hidden_layers"] = 8
    for most, units in run_ranks(most_whole_weights, 2, Job.model_validate(deep), Layout(dp_shard=2)):
        assert len(units) == 9
        assert most == units[-1] + (1 + depth) * units[0]


def test_zero3_without_resharding_gathers_everything_once() -> None:
    for most, units in run_ranks(most_whole_weights, 2, job("zero3"), Layout(dp_shard=2)):
        assert most == sum(units)


def test_zero2_never_holds_all_gradients_whole() -> None:
    """One bucket in the making, two being scattered; the last one also has the embedding's and the head's rows."""
    deep = job("zero2").model_dump()
    deep["model"]["num_hidden_layers"] = 8
    for most, buckets in run_ranks(most_whole_gradients, 2, Job.model_validate(deep), Layout(dp_shard=2)):
        assert len(buckets) == 9
        assert 2 * buckets[0] <= most <= buckets[-1] + 3 * buckets[0] < sum(buckets) / 2
