"""What the formulas say is sent, against the bytes that real collectives of eight ranks carry."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.exchange import OVERLAPS, sent_share
from elastic_train.planner.traffic import traffic_of
from tests.planner.real_steps import Carried, carried_by_a_step
from tests.ranks import run_ranks
from tests.training.synthetic import small_job

# Nothing divides by 8, so that all padding counts.
MODEL = {
    "hidden_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 104,
    "vocab_size": 99,
}
BF16 = {"precision": "bf16"}
EXACT = {"determinism": "exact"}
ADAPTERS = {"rank": 5, "target_modules": "all-linear"}


def case(
    layout: Layout, data: str = "zero3", training: dict[str, Any] | None = None, **others: Any
) -> tuple[Job, Layout]:
    """Two micro-batches on every data rank, or as many as a pipeline needs."""
    sequences = max(2, layout.pp) * layout.data_ranks
    model = MODEL | others.pop("model", {})
    optimizer = others.pop("optimizer", {})
    adapted = {"lora": others.pop("lora")} if "lora" in others else {}
    training = {"global_batch": sequences, **(training or {})}
    parallel = {"data": data, **others}
    return small_job(model=model, training=training, optimizer=optimizer, parallel=parallel, **adapted), layout


EIGHT = Layout(dp_shard=8)
TWO_BY_FOUR = Layout(dp_replicate=2, dp_shard=4)
CASES = {
    "ddp": case(Layout(dp_replicate=8), "ddp"),
    "zero1": case(EIGHT, "zero1", BF16),
    "zero2": case(EIGHT, "zero2", BF16 | {"reduce_dtype": "bf16"}),
    "zero2, replicas": case(TWO_BY_FOUR, "zero2", BF16),
    "zero3": case(EIGHT, "zero3", BF16),
    "zero3, resharding": case(EIGHT, "zero3", reshard_after_forward=True),
    "hsdp": case(TWO_BY_FOUR, "hsdp"),
    "hsdp, resharding": case(TWO_BY_FOUR, "hsdp", BF16, reshard_after_forward=True, prefetch=2),
    "hsdp, replicas only": case(Layout(dp_replicate=8), "hsdp"),
    "tied embedding": case(EIGHT, "zero2", model={"tie_word_embeddings": True, "qkv_bias": True}),
    "tp, dp, 1f1b": case(Layout(pp=2, dp_shard=2, tp=2), "zero3", BF16),
    "tp, replicas, gpipe": case(
        Layout(pp=2, dp_replicate=2, tp=2), "ddp", pipeline="gpipe", model={"tie_word_embeddings": True}
    ),
    "pipeline, resharding": case(
        Layout(pp=4, dp_shard=2), "zero3", reshard_after_forward=True, model={"num_hidden_layers": 4}
    ),
    "interleaved": case(Layout(pp=2, dp_shard=4), "zero3", pipeline="interleaved_1f1b", model={"num_hidden_layers": 5}),
    "four stages a rank": case(
        Layout(pp=2, dp_shard=4),
        "zero3",
        pipeline="interleaved_1f1b",
        virtual_stages=4,
        reshard_after_forward=True,
        model={"num_hidden_layers": 9},
    ),
    "zero bubble": case(Layout(pp=2, dp_shard=2, tp=2), "zero2", pipeline="zero_bubble", virtual_stages=1),
    "zero bubble, shards": case(
        Layout(pp=2, dp_shard=4), "zero3", pipeline="zero_bubble", model={"num_hidden_layers": 4}
    ),
    "v": case(Layout(pp=2, dp_shard=2, tp=2), "zero2", pipeline="zbv", model={"num_hidden_layers": 4}),
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
    "lora, ddp": case(Layout(dp_replicate=8), "ddp", lora={}),
    "lora, zero1, tp": case(Layout(dp_shard=4, tp=2), "zero1", BF16, lora=ADAPTERS),
    "lora, zero2, tied": case(Layout(pp=2, dp_shard=4), "zero2", lora=ADAPTERS, model={"tie_word_embeddings": True}),
    "lora, zero3, tp": case(Layout(pp=2, dp_shard=2, tp=2), "zero3", BF16, lora=ADAPTERS),
    "lora, hsdp, resharding": case(TWO_BY_FOUR, "hsdp", BF16, lora=ADAPTERS, reshard_after_forward=True),
    "lora, cp, tp": case(Layout(dp_shard=2, cp=2, tp=2), "zero3", lora={"target_modules": ("up_proj",)}),
    "lora, exact": case(Layout(dp_shard=4, tp=2), "zero3", EXACT, lora=ADAPTERS),
    "exact, whole": case(Layout(pp=2, dp_replicate=4), "ddp", EXACT),
}
MUON = {
    "parts": case(Layout(dp_replicate=2, dp_shard=2, tp=2), "zero1", optimizer={"name": "muon"}),
    "stages": case(Layout(pp=2, dp_replicate=4), "ddp", optimizer={"name": "muon"}),
}


@pytest.fixture(scope="module")
def carried() -> dict[str, list[dict[Carried, tuple[int, int]]]]:
    """Case -> what every rank's collectives carried; all in one start of eight ranks."""
    cases = CASES | MUON
    by_rank = run_ranks(carried_by_a_step, 8, list(cases.values()), timeout=240.0)
    return {name: [rank[index] for rank in by_rank] for index, name in enumerate(cases)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_real_collectives(
    name: str, carried: dict[str, list[dict[Carried, tuple[int, int]]]]
) -> None:
    job, layout = CASES[name]
    for number in range(layout.pp):
        rank = number * layout.world_size // layout.pp
        assert expected(job, layout, rank, number) == carried[name][rank], f"pipeline rank {number}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUON)
def test_matrices_of_muon_on_the_mean_rank(name: str, carried: dict[str, list[dict[Carried, tuple[int, int]]]]) -> None:
    """A rank owns a matrix more or less than another one; together they send what the formula says."""
    job, layout = MUON[name]
    for number in range(layout.pp):
        first = number * layout.world_size // layout.pp
        stage = members(layout, first, "stage")
        wanted = expected(job, layout, first, number)[stage, "all_to_all", "float32"]
        found = [carried[name][rank][stage, "all_to_all", "float32"] for rank in stage]
        assert {count for count, _ in found} == {wanted[0]}
        assert sum(sent for _, sent in found) / len(stage) == pytest.approx(wanted[1], abs=1)


@pytest.mark.parametrize(
    ("data", "layout", "units"),
    [("ddp", Layout(dp_replicate=8), 2), ("zero1", EIGHT, 3), ("zero2", EIGHT, 2), ("zero3", EIGHT, 2)],
)
def test_units_of_data_parallelism(data: str, layout: Layout, units: int) -> None:
    """In units of the weights' bytes x (N - 1)/N, one number format, one micro-batch: DDP 2, FSDP 3 if it releases."""
    job, _ = case(layout, data, {"precision": "bf16", "reduce_dtype": "bf16", "global_batch": 8}, model=EVEN)
    weights = 2 * job.model.num_parameters * 7 / 8
    assert state_bytes(job, layout) / weights == pytest.approx(units)


def test_fsdp_that_releases_moves_three_units() -> None:
    """Of what is in blocks; the rest is gathered once. Three micro-batches more cost as much again, each."""
    for sequences, factor in ((8, 1), (32, 4)):
        training = {"precision": "bf16", "reduce_dtype": "bf16", "global_batch": sequences}
        job, _ = case(EIGHT, "zero3", training, model=EVEN, reshard_after_forward=True)
        outer = 2 * job.model.vocab_size * job.model.hidden_size + job.model.hidden_size
        weights = 2 * (job.model.num_parameters - outer) * 7 / 8
        assert state_bytes(job, EIGHT, "blocks") / weights == pytest.approx(3 * factor)


def test_a_ring_moves_a_share_less_than_everything() -> None:
    assert [sent_share("all_reduce", ranks) for ranks in (1, 2, 4)] == [0, 1, 1.5]
    assert [sent_share("all_gather", ranks) for ranks in (1, 2, 4)] == [0, 0.5, 0.75]
    assert sent_share("send", 2) == 1


def test_the_rank_that_sends_most_is_told_when_none_is_named() -> None:
    """The last one has the head: its tokens and sums, and its weights."""
    job, layout = CASES["tp, dp, 1f1b"]
    sent = [sum(each.sent_bytes for each in traffic_of(job, layout, number)) for number in range(2)]
    assert sum(each.sent_bytes for each in traffic_of(job, layout)) == max(sent)
    assert sent[0] != sent[1]


@pytest.mark.parametrize("name", CASES)
def test_every_exchange_says_what_hides_it(name: str) -> None:
    for each in traffic_of(*CASES[name]):
        assert each.overlaps in OVERLAPS
        assert each.units >= 1


EVEN = {"hidden_size": 64, "head_dim": 8, "num_key_value_heads": 8, "vocab_size": 128}


def state_bytes(job: Job, layout: Layout, what: str = "") -> float:
    """Sent for weights and gradients."""
    return sum(
        each.sent_bytes for each in traffic_of(job, layout) if each.axis in ("shard", "batch") and what in each.what
    ) - (0 if what else 2 * 8 * 7 / 8 * (layout.data_ranks > 1))


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
    "ends": {"pp"},
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
