"""Memory per rank: peaks against the real engine, resident growth, and what users ask about (CASES.md, theme 1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.config.layout import Coordinates, Layout
from elastic_train.config.load import load_job, parse_job
from elastic_train.config.presets import PRESETS
from elastic_train.config.sizes import parse_size
from elastic_train.planner.hardware_table import accelerators
from elastic_train.planner.host_memory import host_problem, node_bytes
from elastic_train.planner.memory import RankMemory, memory_bytes, memory_of
from elastic_train.planner.parameters import stages_of_ranks
from elastic_train.planner.step_memory import StepMemory
from tests.config.job_files import GOOD
from tests.planner.fake_engine import Case, hold
from tests.planner.resident_ranks import growth
from tests.ranks import run_ranks
from tests.training.synthetic import small_job

GIB = 2**30
QUICKSTART = Path(__file__).parents[2] / "jobs" / "configs" / "quickstart.yaml"
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 1024,
}


def case(strategy: str, layout: Layout, *, stage: int = 0, tokens: int = 128, **sections: dict[str, Any]) -> Case:
    job = small_job(
        model=MODEL,
        data={"sequence_length": tokens} | sections.get("data", {}),
        training={"precision": "bf16", "global_batch": 2 * layout.data_ranks} | sections.get("training", {}),
        parallel={"data": strategy} | sections.get("parallel", {}),
        **{name: fields for name, fields in sections.items() if name == "lora"},
    )
    return Case(job, layout, Coordinates(stage, 0, 0, 0, 0), steps=1)


FOUR = Layout(dp_shard=4)
PIPED = Layout(pp=2, dp_shard=2)
PEAKS = [
    case("ddp", Layout(dp_replicate=4), training={"recompute": "full"}),
    case("zero1", FOUR, training={"reduce_dtype": "bf16"}, data={"document_mask": True}, tokens=512),
    case("zero2", FOUR),
    case("zero3", FOUR),
    case("zero3", FOUR, training={"precision": "fp32", "global_batch": 4}),
    case("zero3", FOUR, parallel={"reshard_after_forward": True, "prefetch": 0}),
    case("zero3", FOUR, parallel={"reshard_after_forward": True, "prefetch": 1}, tokens=512),
    case("hsdp", Layout(dp_replicate=2, dp_shard=2)),
    case("zero3", Layout(dp_shard=2, cp=2, tp=2)),
    *(case("zero3", PIPED, stage=stage, parallel={"pipeline": "gpipe"}) for stage in (0, 1)),
    case("zero1", PIPED, stage=1),
    case("ddp", Layout(), lora={}),
    case("zero2", FOUR, lora={"target_modules": "all-linear", "rank": 64}),
    case("zero3", FOUR, lora={"target_modules": "all-linear"}, parallel={"reshard_after_forward": True}, tokens=512),
    case("zero3", Layout(dp_shard=2, tp=2), lora={"target_modules": ("o_proj", "gate_proj"), "rank": 32}),
    case("zero3", PIPED, stage=1, lora={}, training={"recompute": "full"}),
]


@pytest.mark.slow
def test_most_that_a_step_holds() -> None:
    """The real engine takes a step over tensors without data, in which gloo makes no copies."""
    for one, held in zip(PEAKS, run_ranks(hold, 1, PEAKS, timeout=280)[0], strict=True):
        job, place = one.job, one.place.pp
        stages = stages_of_ranks(job.model, job.parallel, one.layout, job.data.sequence_length, job.lora)[place]
        moments = StepMemory(job, one.layout, place, stages).moments()
        computed = max(terms.total() - terms["copies by gloo"] for _, terms in moments)
        assert computed == pytest.approx(held.most, rel=0.05), f"{job.parallel} on {one.layout}, stage {place}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(pp=2, dp_shard=2), ()),
        (Layout(dp_replicate=2), ("parallel.pp=1", "parallel.data=ddp")),
    ],
    ids=str,
)
def test_resident_memory_grows_as_computed_at_the_size_of_the_quickstart(
    layout: Layout, overrides: tuple[str, ...]
) -> None:
    small = ("model.hidden_size=64", "model.intermediate_size=64", "model.vocab_size=64", "data.sequence_length=32")
    job, tiny = load_job(QUICKSTART, overrides), load_job(QUICKSTART, [*overrides, *small])
    memory = memory_of(job, layout)
    for rank, grown in enumerate(run_ranks(growth, layout.world_size, tiny, job, layout)):
        computed = memory[layout.coordinates(rank).pp]
        assert computed.total - computed.terms["allocator slack"] == pytest.approx(grown, rel=0.05), f"rank {rank}"


def gpu_job(model: dict[str, Any], data: str, *, micro_batches: int = 1, ranks: int = 8, **fields: Any) -> Job:
    """bf16 with bf16 reduction, on CUDA. ``fields``: of any section, as ``training__recompute``."""
    sections: dict[str, dict[str, Any]] = {
        "training": {"precision": "bf16", "reduce_dtype": "bf16", "global_batch": ranks * micro_batches},
        "parallel": {"data": data},
        "hosts": {"device": "cuda"},
    }
    for name, value in fields.items():
        section, _, field = name.partition("__")
        sections.setdefault(section, {})[field] = value
    sections["training"]["global_batch"] *= sections["training"].get("micro_batch", 1)
    return small_job(model=model, **sections)


def one_rank(job: Job, layout: Layout) -> RankMemory:
    (memory,) = memory_of(job, layout)
    return memory


LLAMA_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
BAICHUAN_13B = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "intermediate_size": 13696,
    "vocab_size": 125696,
}
QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "qkv_bias": True,
    "max_position_embeddings": 32768,
}


def test_mem_01_state_with_bf16_reduction_is_the_textbooks() -> None:
    layouts = {"ddp": Layout(dp_replicate=8), "zero2": Layout(dp_shard=8), "zero3": Layout(dp_shard=8)}
    for (data, layout), expected in zip(layouts.items(), (100.41, 23.53, 12.55), strict=True):
        job = gpu_job(LLAMA_7B, data)
        assert job.model.num_parameters == 6_738_415_616
        assert sum(one_rank(job, layout).state.values()) / GIB == pytest.approx(expected, abs=0.01)
    default = gpu_job(LLAMA_7B, "ddp", training__reduce_dtype="fp32")
    assert sum(one_rank(default, layouts["ddp"]).state.values()) == 18 * 6_738_415_616


def test_mem_02_four_gpus_are_too_few_for_zero2_and_enough_for_zero3() -> None:
    limit, shape = 79.35 * GIB, {"data__sequence_length": 1536}
    job = gpu_job(BAICHUAN_13B, "zero2", **shape)
    assert job.model.num_parameters == 13_896_668_160
    four, eight = (one_rank(job, Layout(dp_shard=ranks)) for ranks in (4, 8))
    assert [round(sum(memory.state.values()) / GIB, 1) for memory in (four, eight)] == [71.2, 48.5]
    assert four.total > limit > eight.total
    assert sorted(four.terms, key=lambda term: four.terms[term])[-2:] == ["weights", "optimizer state"]  # 2P, 8P / 4
    checkpointed = {"training__recompute": "full", "parallel__reshard_after_forward": True}
    sharded = one_rank(gpu_job(BAICHUAN_13B, "zero3", **shape, **checkpointed), Layout(dp_shard=4))
    assert round(sum(sharded.state.values()) / GIB, 1) == 51.8
    assert sharded.total < limit


def test_mem_05_logits_decide_with_a_large_vocabulary_and_long_sequences() -> None:
    """The case counts 10 bytes a logit; this engine's loss has three float32 numbers of each at once, 12."""
    whole = Layout(dp_shard=8)
    options = {
        "data__sequence_length": 16384,
        "training__recompute": "full",
        "parallel__reshard_after_forward": True,
    }

    def memory(batch: int, layout: Layout = whole) -> RankMemory:
        return one_rank(gpu_job(QWEN_7B, "zero3", training__micro_batch=batch, **options), layout)

    assert gpu_job(QWEN_7B, "zero3").model.num_parameters == 7_615_616_512
    logits = {batch: memory(batch).terms["logits and loss"] for batch in (1, 2, 4)}
    assert logits == {batch: batch * 16384 * 152064 * 12 for batch in (1, 2, 4)}
    assert [memory(batch).total < 80 * GIB for batch in (1, 4)] == [True, False]
    for batch in (1, 2, 4):
        terms = memory(batch).terms
        assert max(terms, key=lambda term: terms[term]) == "logits and loss"
    assert memory(1, Layout(dp_shard=4, cp=2)).terms["logits and loss"] == logits[1] / 2


def test_mem_07_state_shrinks_with_the_ranks_and_activations_do_not() -> None:
    model = LLAMA_7B | {"num_hidden_layers": 28, "vocab_size": 64000}  # 6.19e9 parameters
    ranks = {
        n: one_rank(
            gpu_job(model, "zero3", ranks=n, data__sequence_length=2048, parallel__reshard_after_forward=True),
            Layout(dp_shard=n),
        )
        for n in (2, 4, 8)
    }
    states = {n: sum(memory.state.values()) for n, memory in ranks.items()}
    assert states[2] == pytest.approx(16 * gpu_job(model, "zero3").model.num_parameters / 2, rel=0.001)
    assert states[2] == 2 * states[4] == 4 * states[8]
    for term in ("activations of blocks", "other activations", "logits and loss", "gathered weights"):
        assert len({memory.largest[term] for memory in ranks.values()}) == 1, term


def test_mem_10_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    model = PRESETS["llama3-8b"] | {"vocab_size": 1024}  # a head that costs nothing: layers are split evenly

    def activations(pipeline: str) -> list[int]:
        job = gpu_job(model, "ddp", ranks=1, micro_batches=8, data__sequence_length=4096, parallel__pipeline=pipeline)
        return [memory.terms["activations of blocks"] for memory in memory_of(job, Layout(pp=8))]

    block = activations("1f1b")[-1]
    assert activations("1f1b") == [count * block for count in (8, 7, 6, 5, 4, 3, 2, 1)]
    assert activations("gpipe") == [8 * block] * 8
    job = gpu_job(model, "ddp", ranks=1, micro_batches=8, data__sequence_length=4096)
    ranks = memory_of(job, Layout(pp=8))
    assert memory_bytes(job, Layout(pp=8)) == ranks[0].total == max(memory.total for memory in ranks)


@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
@pytest.mark.parametrize(("layout", "micro_batches"), [(Layout(pp=4), 7), (Layout(pp=6, dp_shard=2), 6)])
def test_a_job_needs_what_its_fullest_rank_needs(pipeline: str, layout: Layout, micro_batches: int) -> None:
    fields = {"parallel__pipeline": pipeline, "data__sequence_length": 1024}
    job = gpu_job(PRESETS["llama3-8b"], "zero2", ranks=layout.dp_shard, micro_batches=micro_batches, **fields)
    assert memory_bytes(job, layout) == max(memory.total for memory in memory_of(job, layout))


def test_mem_12_units_are_those_that_are_written() -> None:
    sizes = {text: parse_size(text) for text in ("80GB", "80GiB", "81559MiB")}
    assert [round(size / GIB, 2) for size in sizes.values()] == [74.51, 80.0, 79.65]
    assert [size - 77 * GIB > 0 for size in sizes.values()] == [False, True, True]
    with pytest.raises(ConfigError, match="must be a size such as 80GiB"):
        parse_job(GOOD, ["hosts.memory='80e9'"])


def test_offloaded_state_is_not_on_the_device() -> None:
    kept, away = (
        one_rank(gpu_job(LLAMA_7B, "zero3", data__sequence_length=2048, parallel__offload=offload), Layout(dp_shard=8))
        for offload in (False, True)
    )
    assert away.state == kept.state
    assert not away.terms.keys() & away.state.keys()
    copied = away.terms["copies from CPU memory"]
    assert copied == 2 * 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) / 8  # of a block, and of the one to come
    assert away.total == pytest.approx(
        kept.total - sum(kept.terms[term] for term in ("master weights", "optimizer state")) + 1.05 * copied
    )


def test_offloaded_state_is_in_the_memory_of_the_node() -> None:
    """Pinned memory comes in powers of two, tensor by tensor: torch's ``CachingHostAllocator``."""
    layout = Layout(dp_shard=8)
    job = gpu_job(LLAMA_7B, "zero3", data__sequence_length=2048, parallel__offload=True)
    host = one_rank(job, layout).host
    square, wide, table = 4096**2 // 8, 4096 * 11008 // 8, 32000 * 4096 // 8
    assert (wide, table) == (5_636_096, 16_384_000)
    norms = (2 * 32 + 1) * 4096 // 8
    pinned = 4 * (32 * (4 * square + 3 * 2**23) + 2 * 2**24 + norms)
    assert host["master weights, pinned"] == host["gradients, pinned"] == pinned
    assert host["optimizer state"] == 8 * 6_738_415_616 / 8
    assert host["gradients in float32"] == 4 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) / 8
    assert node_bytes(job, layout, 8) == 8 * sum(host.values())
    assert node_bytes(job, Layout(dp_shard=16), 8) < 0.61 * node_bytes(job, layout, 8)
    assert one_rank(gpu_job(LLAMA_7B, "zero3"), layout).host == {}


def test_offloaded_state_that_is_more_than_a_node_has() -> None:
    layout, h100 = Layout(dp_shard=8), accelerators()["h100-80gb"]
    job = gpu_job(LLAMA_7B, "zero3", data__sequence_length=2048, parallel__offload=True)
    needed = node_bytes(job, layout, 8)
    assert host_problem(job, layout, replace(h100, host_memory_bytes=needed)) is None
    problem = host_problem(job, layout, replace(h100, host_memory_bytes=needed - 1))
    assert problem is not None and f"{needed / GIB:,.2f} GiB of CPU memory on a node (8 ranks of" in problem


def test_masks_of_documents_are_kept_by_every_micro_batch_in_flight() -> None:
    """Of a micro-batch [B, S, S] numbers of two bytes, and cosines and sines for every token of it."""
    shape = {"data__sequence_length": 1024, "training__micro_batch": 2, "parallel__pipeline": "gpipe"}
    plain, masked = (
        memory_of(gpu_job(LLAMA_7B, "ddp", ranks=1, micro_batches=4, data__document_mask=mask, **shape), Layout(pp=2))[
            0
        ]
        for mask in (False, True)
    )
    each = 2 * 1024 * 1024 * 2 + 2 * (2 * 1024) * 128 * 4
    assert masked.largest["other activations"] - plain.largest["other activations"] == 4 * each


def test_masked_attention_with_grouped_heads_needs_no_probabilities() -> None:
    """Keys and values are kept as they are repeated for a kernel without groups: 2 x (32 - 8) heads of 128, 2 bytes."""
    plain, masked = (
        one_rank(
            gpu_job(PRESETS["llama3-8b"], "zero3", data__sequence_length=16384, data__document_mask=mask),
            Layout(dp_shard=8),
        )
        for mask in (False, True)
    )
    more = masked.largest["activations of blocks"] - plain.largest["activations of blocks"]
    assert more == 32 * 16384 * 2 * 24 * 128 * 2


def test_mem_13_selective_recomputation_saves_little_where_attention_is_fused() -> None:
    model = LLAMA_7B | {"vocab_size": 1024}
    none, selective, full = (
        one_rank(
            gpu_job(model, "ddp", data__sequence_length=4096, training__recompute=mode), Layout(dp_replicate=8)
        ).terms["activations of blocks"]
        for mode in ("none", "selective", "full")
    )
    assert selective < none < 1.1 * selective
    assert full == 32 * 32 * 2**20 and 8 * full <= none
