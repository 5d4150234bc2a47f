"""What the formulas say is sent, against the bytes that real collectives of eight ranks carry."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.traffic import traffic_of
from tests.planner.real_steps import Carried, carried_by_a_step
from tests.ranks import run_ranks
from tests.training.synthetic import small_job

# Nothing divides by 8, so that all padding counts.
MODEL = {
    "hidden_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 104,
    "vocab_size": 99,
}
BF16 = {"precision": "bf16"}
TWO = {"global_batch": 16}
"""sequences: two micro-batches on each of eight data ranks"""
EXACT = {"determinism": "exact"}


def case(
    layout: Layout, data: str = "zero3", training: dict[str, Any] | None = None, **others: Any
) -> tuple[Job, Layout]:
    model = MODEL | others.pop("model", {})
    optimizer = others.pop("optimizer", {})
    return small_job(
        model=model, training=training or {}, optimizer=optimizer, parallel={"data": data, **others}
    ), layout


EIGHT = Layout(dp_shard=8)
TWO_BY_FOUR = Layout(dp_replicate=2, dp_shard=4)
CASES = {
    "ddp": case(Layout(dp_replicate=8), "ddp", TWO),
    "zero1": case(EIGHT, "zero1", TWO | BF16),
    "zero1, replicas": case(TWO_BY_FOUR, "zero1"),
    "zero2": case(EIGHT, "zero2", TWO | BF16 | {"reduce_dtype": "bf16"}),
    "zero2, replicas": case(TWO_BY_FOUR, "zero2", TWO | BF16),
    "zero3": case(EIGHT, "zero3", TWO | BF16),
    "zero3, resharding": case(EIGHT, "zero3", TWO, reshard_after_forward=True),
    "hsdp": case(TWO_BY_FOUR, "hsdp", TWO),
    "hsdp, resharding": case(TWO_BY_FOUR, "hsdp", TWO | BF16, reshard_after_forward=True, prefetch=2),
    "hsdp, replicas only": case(Layout(dp_replicate=8), "hsdp"),
    "tied embedding": case(EIGHT, "zero2", TWO, model={"tie_word_embeddings": True, "qkv_bias": True}),
    "tp, dp, 1f1b": case(Layout(pp=2, dp_shard=2, tp=2), "zero3", BF16),
    "tp, replicas, gpipe": case(
        Layout(pp=2, dp_replicate=2, tp=2), "ddp", pipeline="gpipe", model={"tie_word_embeddings": True}
    ),
    "pipeline, resharding": case(Layout(pp=4, dp_shard=2), "zero3", reshard_after_forward=True),
    "interleaved": case(Layout(pp=2, dp_shard=4), "zero3", pipeline="interleaved_1f1b"),
    "four stages a rank": case(
        Layout(pp=2, dp_shard=2, tp=2),
        "zero3",
        pipeline="interleaved_1f1b",
        virtual_stages=4,
        model={"num_hidden_layers": 9},
    ),
    "four stages a rank, resharding": case(
        Layout(pp=2, dp_shard=4),
        "zero3",
        TWO,
        pipeline="interleaved_1f1b",
        virtual_stages=4,
        model={"num_hidden_layers": 9},
        reshard_after_forward=True,
    ),
    "zero bubble": case(Layout(pp=2, dp_shard=2, tp=2), "zero2", pipeline="zero_bubble", virtual_stages=1),
    "zero bubble, shards": case(Layout(pp=2, dp_shard=4), "zero3", pipeline="zero_bubble"),
    "v": case(Layout(pp=2, dp_shard=2, tp=2), "zero2", pipeline="zbv"),
    "v, replicas": case(Layout(pp=2, dp_replicate=4), "ddp", pipeline="zbv"),
    "cp, tp": case(Layout(dp_shard=2, cp=2, tp=2), "zero3", BF16),
    "cp, recomputing attention": case(Layout(dp_shard=2, cp=4), "zero1", {"recompute": "selective"}),
    "cp, tp, recomputing blocks": case(
        Layout(dp_shard=2, cp=2, tp=2), "zero3", {"recompute": "full"}, reshard_after_forward=True
    ),
    "heads for tokens": case(Layout(dp_shard=2, cp=2, tp=2), "zero2", context="ulysses"),
    "heads, recomputing attention": case(
        Layout(dp_shard=4, cp=2), "zero3", {"recompute": "selective"}, context="ulysses"
    ),
    "heads, recomputing blocks": case(Layout(dp_shard=4, cp=2), "zero3", {"recompute": "full"}, context="ulysses"),
    "exact, shards": case(Layout(dp_shard=4, tp=2), "zero3", EXACT),
    "exact, replicas": case(Layout(dp_replicate=2, dp_shard=2, cp=2), "zero1", EXACT),
    "exact, whole": case(Layout(pp=2, dp_replicate=4), "ddp", EXACT),
}


@pytest.fixture(scope="module")
def carried() -> dict[str, list[dict[Carried, tuple[int, int]]]]:
    """Case -> what every rank's collectives carried; all in one start of eight ranks."""
    by_rank = run_ranks(carried_by_a_step, 8, list(CASES.values()))
    return {name: [rank[index] for rank in by_rank] for index, name in enumerate(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_real_collectives(
    name: str, carried: dict[str, list[dict[Carried, tuple[int, int]]]]
) -> None:
    job, layout = CASES[name]
    for number in range(layout.pp):
        rank = number * layout.world_size // layout.pp
        assert expected(job, layout, rank, number) == carried[name][rank], f"pipeline rank {number}"


def expected(job: Job, layout: Layout, rank: int, number: int) -> dict[Carried, tuple[int, int]]:
    """Exchanges of the planner by group, collective and dtype: several kinds may be of the same."""
    count: Counter[Carried] = Counter()
    payload: Counter[Carried] = Counter()
    for each in traffic_of(job, layout, number):
        key = members(layout, rank, each.axis), each.collective, each.dtype
        count[key] += each.count
        payload[key] += round(each.count * each.payload_bytes)
    return {key: (count[key], payload[key]) for key in count}


AXES_OF = {
    "tp": {"tp"},
    "cp": {"cp"},
    "pp": {"pp"},
    "shard": {"dp_shard", "cp"},
    "replicate": {"dp_replicate"},
    "batch": {"dp_replicate", "dp_shard", "cp"},
    "stage": {"dp_replicate", "dp_shard", "cp", "tp"},
    "world": {"pp", "dp_replicate", "dp_shard", "cp", "tp"},
}


def members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Ranks that differ from ``rank`` along ``axis`` only."""
    place = layout.coordinates(rank)
    fixed = [each for each in layout.as_dict() if each not in AXES_OF[axis]]
    others = [(other, layout.coordinates(other)) for other in range(layout.world_size)]
    return tuple(other for other, at in others if all(getattr(at, each) == getattr(place, each) for each in fixed))
