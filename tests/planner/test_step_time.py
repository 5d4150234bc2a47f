"""Terms of a step: what hides what, what a bubble costs, and the arithmetic that people do by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.presets import PRESETS
from elastic_train.planner.exchange import exchange
from elastic_train.planner.flops import computed_keys, hardware_flops_per_token
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.schedule import schedule_slots
from elastic_train.planner.step_time import StepTime, step_time
from elastic_train.planner.traffic import traffic_of
from elastic_train.planner.transfer import transfer_seconds
from tests.training.synthetic import small_job

H100 = accelerator("h100-80gb")
NO_MEMORY = replace(H100, memory_bytes_per_second=1e30, launch_seconds=0.0)
"""Compute waits for nothing."""
NO_LATENCY = replace(H100, link_latency_seconds=0.0, network_latency_seconds=0.0, transfer_efficiency=1.0)


def llama(
    model: str = "llama3-8b", sequences: int = 64, training: dict[str, Any] | None = None, **parallel: Any
) -> Job:
    return small_job(
        model=PRESETS[model],
        data={"sequence_length": 8192},
        training={"precision": "bf16", "global_batch": sequences, **(training or {})},
        parallel=parallel,
    )


def test_two_gigabytes_over_a_link_of_100_take_20_milliseconds() -> None:
    slow = replace(NO_LATENCY, link_bytes_per_second=100e9)
    sent = exchange(Layout(pp=2), "pp", "activations", "send", 1, 2e9, "bfloat16")
    assert transfer_seconds(sent, Layout(pp=2), slow) == pytest.approx(0.020)


def test_a_ring_goes_through_the_cards_of_all_its_ranks_of_a_node() -> None:
    """1 GB gathered by ranks on 2 nodes: half of it crosses over, on as many cards as there are ranks on a node."""
    fast = replace(NO_LATENCY, link_bytes_per_second=1e15)
    for layout, cards in ((Layout(dp_shard=16), 8), (Layout(dp_shard=4, tp=4), 2), (Layout(dp_shard=2, tp=8), 1)):
        gathered = exchange(layout, "shard", "weights", "all_gather", 1, 1e9, "bfloat16")
        assert transfer_seconds(gathered, layout, fast) == pytest.approx(1e9 / 2 / (cards * 50e9))
    inside = exchange(Layout(dp_shard=8), "shard", "weights", "all_gather", 3, 1e9, "bfloat16")
    assert transfer_seconds(inside, Layout(dp_shard=8), NO_LATENCY) == pytest.approx(3 * 1e9 * 7 / 8 / 450e9)


@pytest.mark.parametrize(
    ("layout", "outside", "ends"),
    [
        (Layout(pp=4, tp=2), 0.0, 0.0),
        (Layout(pp=4, tp=4), 0.5, 1.0),  # two stages on a node: one of the two neighbours is elsewhere
        (Layout(pp=16), 0.5, 1.0),
        (Layout(pp=2, tp=8), 1.0, 1.0),
    ],
)
def test_a_stage_sends_to_another_node_where_its_neighbour_is_there(
    layout: Layout, outside: float, ends: float
) -> None:
    """1 GB takes 1 / 450 s on links, 1 / 50 s on the network."""
    for axis, share in (("pp", outside), ("ends", ends)):
        sent = exchange(layout, axis, "activations", "send", 3, 1e9, "bfloat16")  # type: ignore[arg-type]
        seconds = 3 * ((1 - share) / 450 + share / 50)
        assert transfer_seconds(sent, layout, NO_LATENCY) == pytest.approx(seconds)


def test_small_exchanges_are_a_matter_of_hops() -> None:
    layout = Layout(dp_shard=1024)
    for collective, hops in (("all_gather", 127 * 5e-6 + 7 * 2e-6), ("all_reduce", 2 * (7 * 5e-6 + 7 * 2e-6))):
        tiny = exchange(layout, "shard", "nothing", collective, 1, 1, "float32")  # type: ignore[arg-type]
        assert transfer_seconds(tiny, layout, H100) == pytest.approx(hops, rel=1e-3)


def test_terms_add_up_and_compute_is_operations_over_the_rate() -> None:
    job, layout = llama(), Layout(dp_shard=8)
    time = step_time(job, layout, NO_MEMORY)
    assert time.total == pytest.approx(sum(time.terms.values()))
    compute = sum(time.terms[name] for name in ("forward", "backward", "recomputation"))
    flops = hardware_flops_per_token(job, computed_keys(job, layout)) * 64 * 8192 / 8
    assert compute == pytest.approx(flops / (H100.peak("bf16") * H100.efficiency))
    assert time.tokens_per_second == pytest.approx(64 * 8192 / time.total)
    assert time.use.hfu == pytest.approx(H100.efficiency * compute / time.total)
    assert 0 < time.exposed < 0.1 * time.total
    assert time.bubble == 0.0


@pytest.mark.parametrize(
    ("context", "options", "keys"),
    [("gather", {}, 17 / 32), ("gather", {"document_mask": True}, 17 / 32), ("ulysses", {}, 1 / 2)],
)
def test_operations_are_those_that_context_parallel_kernels_compute(
    context: str, options: dict[str, Any], keys: float
) -> None:
    """At full efficiency under masks, too, compute takes what ``hfu`` counts: with 8 ranks 17 of 32 chunks of keys."""
    job = small_job(
        model=PRESETS["llama3-8b"],
        data={"sequence_length": 8192, **options},
        training={"precision": "bf16", "global_batch": 8, "recompute": "selective"},
        parallel={"context": context},
    )
    layout = Layout(cp=8)
    assert computed_keys(job, layout) == pytest.approx(keys * 8192, rel=2e-4)
    time = step_time(job, layout, replace(NO_MEMORY, masked_attention=1.0))
    compute = sum(time.terms[name] for name in ("forward", "backward", "recomputation"))
    assert time.use.hfu == pytest.approx(H100.efficiency * compute / time.total)


def test_offloaded_state_goes_over_the_bus_and_is_updated_by_the_cpu() -> None:
    """Per rank an eighth of 8.03e9 float32 weights there and as many gradients back, once a step; 32 bytes a weight."""
    layout, chip = Layout(dp_shard=8), replace(NO_LATENCY, overlaps=False)
    sections = {"training": {"precision": "bf16", "global_batch": 64}, "data": {"sequence_length": 8192}}
    kept, away = (
        step_time(
            small_job(model=PRESETS["llama3-8b"], parallel=parallel, hosts={"device": "cuda"}, **sections), layout, chip
        )
        for parallel in ({"data": "zero3"}, {"data": "zero3", "offload": True})
    )
    part = small_job(model=PRESETS["llama3-8b"]).model.num_parameters / 8
    assert away.terms["copies from and to CPU memory"] == pytest.approx(8 * part / 64e9, rel=1e-4)
    assert away.terms["update"] == pytest.approx(32 * part / 76.8e9, rel=1e-4)
    assert away.total - kept.total == pytest.approx(
        8 * part / 64e9 + away.terms["update"] - kept.terms["update"], rel=1e-4
    )


def test_copies_of_offloaded_weights_hide_behind_compute() -> None:
    sections = {"training": {"precision": "bf16", "global_batch": 64}, "data": {"sequence_length": 8192}}
    parallel = {"data": "zero3", "offload": True, "reshard_after_forward": True}
    job = small_job(model=PRESETS["llama3-8b"], parallel=parallel, hosts={"device": "cuda"}, **sections)
    time = step_time(job, Layout(dp_shard=8), H100)
    assert time.hidden["weights of blocks from CPU memory"] > 0.9 * 16 * 7e9 * 4 / 8 / 64e9
    assert time.terms["copies from and to CPU memory"] < time.hidden["weights of blocks from CPU memory"]


def test_a_mesh_is_slow_for_few_ranks() -> None:
    chip = replace(accelerator("mi300x"), link_latency_seconds=0.0, transfer_efficiency=1.0)
    for ranks in (2, 4, 8):
        layout = Layout(dp_shard=8 // ranks, tp=ranks)
        gathered = exchange(layout, "tp", "activations", "all_gather", 1, 1e9, "bfloat16")
        assert transfer_seconds(gathered, layout, chip) == pytest.approx(1e9 / ranks / 64e9)


def test_a_mask_of_documents_makes_kernels_compute_all_scores() -> None:
    """8,192 keys for 4,096.5, at half the speed; in MFU the useful ones stay as they are."""
    plain, masked = (
        step_time(
            small_job(
                model=PRESETS["llama3-8b"],
                data={"sequence_length": 8192, "document_mask": mask},
                training={"precision": "bf16", "global_batch": 8},
            ),
            Layout(dp_shard=8),
            NO_MEMORY,
        )
        for mask in (False, True)
    )
    attention = 3.5 * 32 * 4 * 4096 * (2 * 8192 - 8193 / 2) * 8192 / (H100.peak("bf16") * H100.efficiency)
    names = ("forward", "backward", "recomputation")
    more = sum(masked.terms[name] - plain.terms[name] for name in names)
    assert more == pytest.approx(attention)
    assert masked.use.mfu * masked.total == pytest.approx(plain.use.mfu * plain.total)


def test_days_and_cost() -> None:
    time = step_time(llama(), Layout(dp_shard=8), H100)
    assert time.days(time.tokens_per_second * 86_400) == pytest.approx(1.0)
    assert time.cost(time.tokens_per_second * 3600, price_per_hour=2.5, paid=9) == pytest.approx(9 * 2.5)


def test_efficiency_replaces_the_accelerators() -> None:
    job, layout = llama(), Layout(dp_shard=8)
    half = step_time(job, layout, NO_MEMORY, efficiency=H100.efficiency / 2)
    assert half.terms["forward"] == pytest.approx(2 * step_time(job, layout, NO_MEMORY).terms["forward"])


def test_gathering_weights_hides_behind_compute_but_for_the_first() -> None:
    """31 of 32 blocks; with ``prefetch: 0`` none."""
    layout = Layout(dp_shard=8)
    ahead, none = (step_time(llama(data="zero3", prefetch=depth), layout, H100) for depth in (1, 0))
    (blocks,) = (each for each in traffic_of(llama(data="zero3"), layout) if each.what == "weights of blocks")
    seconds = transfer_seconds(blocks, layout, H100)
    assert ahead.hidden["weights of blocks"] == pytest.approx(seconds * 31 / 32)
    assert none.terms["weights gathered"] - ahead.terms["weights gathered"] == pytest.approx(seconds * 31 / 32)


def test_the_update_is_a_matter_of_memory() -> None:
    """Adam: gradients read twice (norm, update), weights and moments read and written, bf16 weights written: 34 bytes
    of each parameter that a rank updates.
    """
    job = llama("llama3-8b", data="zero3")
    seconds = 34 * job.model.num_parameters / (H100.memory_bytes_per_second * H100.transfer_efficiency)
    assert step_time(job, Layout(dp_shard=8), H100).terms["update"] == pytest.approx(seconds / 8)
    whole = llama("llama3-8b", data="ddp")
    assert step_time(whole, Layout(dp_replicate=8), H100).terms["update"] == pytest.approx(seconds)


def test_what_compute_cannot_hide_is_waited_for() -> None:
    """Links a thousand times slower: nearly all of the exchange is exposed, whatever runs beside it."""
    slow = replace(H100, link_bytes_per_second=H100.link_bytes_per_second / 1000)
    time = step_time(llama(data="zero3", reshard_after_forward=True), Layout(dp_shard=8), slow)
    assert time.exposed > 0.9 * time.total


def test_an_accelerator_that_does_not_overlap_waits_for_all() -> None:
    job, layout = llama(), Layout(dp_shard=8)
    time = step_time(job, layout, replace(H100, overlaps=False))
    assert time.hidden == {}
    assert time.total > step_time(job, layout, H100).total


def test_reduced_gradients_of_zero3_are_updated_in_float32() -> None:
    """FSDP2 casts them: 8 bytes are read, for the norm and the update, where zero1 reads 4 of bf16; 24 + 2 beside."""
    layout, training = Layout(dp_shard=8), {"reduce_dtype": "bf16"}
    update = {
        data: step_time(llama(training=training, data=data), layout, H100).terms["update"]
        for data in ("zero1", "zero3")
    }
    assert update["zero3"] / update["zero1"] == pytest.approx(34 / 30)


@pytest.mark.parametrize(
    ("pipeline", "stages", "divisor"),
    [("1f1b", 2, 1), ("interleaved_1f1b", 2, 2), ("zero_bubble", 1, 3), ("zbv", 2, 6)],
)
def test_the_bubble_is_that_of_the_schedule(pipeline: str, stages: int, divisor: int) -> None:
    """Against the fill of plain 1f1b on the same ranks: one pass of each other rank."""
    layout = Layout(pp=4, tp=8)
    training = {"reduce_dtype": "bf16"}
    plain = step_time(llama(training=training, pipeline="1f1b"), layout, H100)
    other = step_time(llama(training=training, pipeline=pipeline, virtual_stages=stages), layout, H100)
    assert other.terms["bubble"] == pytest.approx(plain.terms["bubble"] / divisor, rel=0.1)


def test_a_pipeline_takes_as_long_as_its_slots() -> None:
    """Without exchanges and update: the closed form against the schedule, played through with unequal stages."""
    free = replace(
        H100,
        link_bytes_per_second=1e30,
        network_bytes_per_second=1e30,
        memory_bytes_per_second=1e30,
        link_latency_seconds=0.0,
        network_latency_seconds=0.0,
    )
    job, layout = llama(sequences=16, pipeline="1f1b"), Layout(pp=4)
    time = step_time(job, layout, free)
    work = [stage_seconds(job, free, rank) for rank in range(4)]
    slots = schedule_slots("1f1b", 4, 16, 1, cost=lambda kind, stage: work[stage][kind == "B"])
    assert time.total == pytest.approx(max(slot.end for rank in slots for slot in rank), rel=0.01)


def stage_seconds(job: Job, machine: Accelerator, rank: int) -> tuple[float, float]:
    """Forward and backward pass of one micro-batch through a stage: of the split 8 9 8 7 and the head."""
    rate = machine.peak("bf16") * machine.efficiency
    model = job.model
    head = 2 * model.hidden_size * model.vocab_size * 8192 * (rank == 3)
    hidden, keys = model.hidden_size, model.num_key_value_heads * model.head_size
    attention = 4 * hidden * 8193 / 2
    block = (2 * hidden * (2 * hidden + 2 * keys) + 6 * hidden * model.intermediate_size + attention) * 8192
    blocks = (8, 9, 8, 7)[rank]
    forward = blocks * block + head
    return forward / rate, (2 * forward + blocks * attention / 2 * 8192) / rate


def test_recomputation_costs_a_third_of_the_forward_and_backward_pass() -> None:
    none, full = (
        step_time(llama(training={"recompute": kind}), Layout(dp_shard=8), H100).terms for kind in ("none", "full")
    )
    more = full["recomputation"] - none["recomputation"]
    assert more / (none["forward"] + none["backward"]) == pytest.approx(0.25, abs=0.05)


def test_fp8_is_for_the_products_of_the_blocks() -> None:
    bf16, fp8 = (
        step_time(small_fp8(precision), Layout(dp_shard=8), H100).terms["forward"] for precision in ("bf16", "fp8")
    )
    assert 0.7 < fp8 / bf16 < 0.85  # published: 6,667 / 8,532 of the whole step
    with pytest.raises(ValueError, match="a100-80gb has no fp8 units"):
        step_time(small_fp8("fp8"), Layout(dp_shard=8), accelerator("a100-80gb"))


def small_fp8(precision: str) -> Job:
    return small_job(
        model=PRESETS["llama3-8b"],
        data={"sequence_length": 8192},
        training={"precision": precision, "global_batch": 8},
        hosts={"device": "cuda"},
    )


def on_cpu(job: Job, layout: Layout) -> StepTime:
    return step_time(job, layout, accelerator("cpu"))


def test_ranks_that_share_cores_are_no_faster_together() -> None:
    """8 ranks on 2 cores compute as fast as 2 do, and pay for exchanges; a bubble is time that others use."""
    job = small_job(model={"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8})
    two, eight = on_cpu(job, Layout(dp_shard=2)), on_cpu(job, Layout(dp_shard=8))
    assert eight.terms["forward"] == pytest.approx(two.terms["forward"])
    assert eight.total > two.total
    assert on_cpu(job, Layout(pp=4, dp_shard=2)).bubble < 0.05
    assert on_cpu(job, Layout(pp=2)).bubble > 0.05


def test_muon_multiplies_matrices_in_its_update() -> None:
    adam, muon = (
        step_time(small_job(model=PRESETS["llama3-8b"], optimizer={"name": name}), Layout(dp_shard=8), H100)
        for name in ("adamw", "muon")
    )
    assert muon.terms["update"] > 2 * adam.terms["update"]
    assert muon.terms["matrices exchanged"] > 0
