"""What the planner says a rank holds against what the real engine allocates, over tensors without data, to 0.1 %.

The engine is that of any rank of up to 1,024; collectives go to torch's fake process group.
"""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Coordinates, Layout
from elastic_train.config.presets import PRESETS
from elastic_train.planner.memory import memory_of
from tests.planner.fake_engine import Case, hold
from tests.ranks import run_ranks
from tests.training.synthetic import small_job

pytestmark = pytest.mark.slow

FIRST = Coordinates(0, 0, 0, 0, 0)


def case(
    preset: str,
    layout: Layout,
    data: str,
    *,
    stage: int = 0,
    steps: int = 1,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    **others: Any,
) -> Case:
    job = small_job(
        model=PRESETS[preset] | (model or {}),
        data={"sequence_length": 1024},
        training={"precision": "bf16", "global_batch": layout.data_ranks, **(training or {})},
        parallel={"data": data, "pipeline": "gpipe"},
        **others,
    )
    return Case(job, layout, Coordinates(stage, 0, 0, 0, 0), steps)


def check(cases: list[Case]) -> None:
    for one, held in zip(cases, run_ranks(hold, 1, cases, timeout=280)[0], strict=True):
        memory = memory_of(one.job, one.layout)[one.place.pp]
        state, name = dict(memory.state), f"{one.job.parallel.data} on {one.layout}, stage {one.place.pp}"
        standing = memory.terms.get("pipeline buffers", 0) if one.steps else 0
        if not one.steps and one.job.parallel.data in ("zero3", "hsdp"):
            del state["gradients"]  # FSDP2 makes them in the first step
        held_bytes = (held.after if one.steps else held.built) - standing
        assert held_bytes == pytest.approx(sum(state.values()), rel=0.001), name


def test_strategies_at_8b() -> None:
    check(
        [
            case("llama3-8b", Layout(dp_replicate=8), "ddp", steps=0),
            case("llama3-8b", Layout(dp_shard=8), "zero1", steps=0),
            case("llama3-8b", Layout(dp_replicate=4, dp_shard=16), "zero2", steps=0, training={"reduce_dtype": "bf16"}),
            case("llama3-8b", Layout(dp_shard=8, cp=2, tp=2), "zero2", steps=0),
            case("llama3-8b", Layout(dp_replicate=2, dp_shard=8), "hsdp", steps=0),
        ]
    )


def test_zero3_at_70b_on_64_ranks() -> None:
    """Published: 17.5 GB with exactly 70e9 parameters, of which 4.4 GB are gradients in float32 here."""
    (built,) = [case("llama3-70b", Layout(dp_shard=64), "zero3", steps=0)]
    check([built])
    state = memory_of(built.job, built.layout)[0].state
    assert sum(state.values()) == pytest.approx(16 * built.job.model.num_parameters / 64, rel=0.001)
    assert sum(state.values()) * 70e9 / built.job.model.num_parameters == pytest.approx(17.5e9, rel=0.001)


def test_all_axes_at_70b_on_1024_ranks() -> None:
    layout = Layout(pp=8, dp_shard=4, cp=4, tp=8)
    check([case("llama3-70b", layout, "zero3", stage=stage) for stage in (0, 7)])


def test_stages_at_405b_on_1024_ranks() -> None:
    """First, middle and last stage; the fullest of 126 layers over 16 stages has 8 of them."""
    wide, deep = Layout(pp=8, dp_shard=16, tp=8), Layout(pp=16, dp_replicate=2, dp_shard=4, tp=8)
    check(
        [
            *(case("llama3-405b", wide, "zero1", stage=stage, steps=0) for stage in (0, 7)),
            *(case("llama3-405b", deep, "hsdp", stage=stage) for stage in (0, 9, 15)),
        ]
    )


def test_tied_embeddings_and_uneven_cuts() -> None:
    """24 shards and 5 of them divide none of 4,096, 14,336 and 128,255."""
    tied, odd = {"tie_word_embeddings": True, "num_hidden_layers": 2}, {"vocab_size": 128_255, "num_hidden_layers": 2}
    check(
        [
            case("llama3-8b", Layout(dp_shard=8), "zero1", steps=0, model=tied),
            *(case("llama3-8b", Layout(pp=2, dp_shard=4), "zero3", stage=stage, model=tied) for stage in (0, 1)),
            case("llama3-8b", Layout(dp_shard=24, tp=8), "zero2", steps=0, model=odd),
            case("llama3-8b", Layout(dp_shard=5, tp=4), "zero3", model=odd),
            case("llama3-8b", Layout(pp=2, dp_shard=5), "zero1", stage=1, steps=0, model=odd),
        ]
    )


def test_adapters() -> None:
    """Frozen weights take 2 bytes each, cut or not; one GPU of 24 GB holds the state of an 8B model."""
    alone = case("llama3-8b", Layout(), "ddp", steps=0, lora={})
    every: dict[str, Any] = {"target_modules": "all-linear", "rank": 64}
    few = {"num_hidden_layers": 4}
    check(
        [
            alone,
            case("llama3-8b", Layout(dp_shard=8), "zero1", steps=0, lora=every, model=few),
            case("llama3-8b", Layout(dp_shard=5), "zero2", steps=0, lora=every, model=few, training={"ema_decay": 0.9}),
            case("llama3-8b", Layout(dp_shard=3, tp=8), "zero3", steps=0, lora=every, model=few),
            case("llama3-8b", Layout(pp=2, dp_shard=2), "zero3", stage=1, lora={}, model={"num_hidden_layers": 12}),
        ]
    )
    state = memory_of(alone.job, alone.layout)[0].state
    adapters = 32 * 8 * (2 * 4096 + 4096 + 1024)
    assert sum(state.values()) == 2 * alone.job.model.num_parameters + 18 * adapters


def test_optimizers_and_averaged_weights() -> None:
    cases = []
    for name in ("sgd", "lion", "muon"):
        values = small_job(parallel={"data": "zero1"}, training={"ema_decay": 0.9, "precision": "bf16"}).model_dump()
        job = Job.model_validate({**values, "optimizer": {"name": name}})
        cases += [Case(job, layout, FIRST) for layout in (Layout(dp_shard=4), Layout(dp_replicate=2))]
    check(cases)
