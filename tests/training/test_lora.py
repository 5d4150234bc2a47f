"""Adapters: what they compute, that every layout trains them alike, and that nothing else moves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from tests.training.runs import FLOAT32, Array, Run, assert_same_steps, run
from tests.training.synthetic import small_job

ALL: dict[str, Any] = {"rank": 4, "alpha": 16, "target_modules": "all-linear"}
STEPS = 3


def lora_job(lora: dict[str, Any] = ALL, **sections: Any) -> Job:
    """The base is random here: a function of the seed, as the adapters are."""
    return small_job(lora=lora, **sections)


def merged(state: dict[str, Array], config: LoraConfig) -> dict[str, Array]:
    """Weights of a model without adapters that computes the same."""
    weights = {key: value.copy() for key, value in state.items() if ".lora_" not in key and key.startswith("param.")}
    for key in weights:
        down, up = (state.get(key.replace(".weight", f".{part}.weight")) for part in ("lora_A", "lora_B"))
        if down is not None and up is not None:
            weights[key] += np.float32(config.alpha / config.rank) * up @ down
    return weights


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), "all-linear"], ids=str)
def test_loss_and_gradients_are_those_of_the_merged_weights(targets: Any) -> None:
    """Of W + s B A the gradient is G: dB = s G A^T, dA = s B^T G."""
    job = lora_job({"rank": 4, "alpha": 6, "target_modules": targets}, model={"qkv_bias": True})
    assert job.lora is not None
    ours = run(job, Layout(), STEPS)
    before = run(job, Layout(), STEPS - 1).after
    plain = small_job(model={"qkv_bias": True})
    whole = merged(before, job.lora)
    zeros = {key: np.zeros_like(whole[f"param.{key.partition('.')[2]}"]) for key in run(plain, Layout(), 0).before}
    theirs = run(plain, Layout(), STEPS, first=STEPS, state=zeros | whole)
    assert ours.losses[-1] == pytest.approx(theirs.losses[0], rel=1e-5)
    found = ours.gradients[-1]
    assert {name.split(".")[-3] for name in found} == set(job.lora.targets)
    assert len(found) == 2 * 4 * len(job.lora.targets)
    for name, gradient in found.items():
        module, part, _ = name.rsplit(".", 2)
        whole_gradient = theirs.gradients[0][f"{module}.weight"]
        down, up = (before[f"param.{module}.{other}.weight"] for other in ("lora_A", "lora_B"))
        expected = 1.5 * (whole_gradient @ down.T if part == "lora_B" else up.T @ whole_gradient)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()), err_msg=name)


def test_a_begins_uniform_b_as_zeros_and_only_they_move() -> None:
    ours = run(lora_job(), Layout(), STEPS)
    plain = run(small_job(), Layout(), 0).before
    for key, value in ours.before.items():
        kind, _, name = key.partition(".")
        if kind == "param" and name.endswith("lora_A.weight"):
            bound = value.shape[1] ** -0.5
            assert 0.8 * bound < np.abs(value).max() <= bound
            assert abs(value.mean()) < 0.15 * bound
            assert value.std() == pytest.approx(bound / 3**0.5, rel=0.2)
        elif ".lora_" in name:
            assert not value.any(), key
        else:
            np.testing.assert_array_equal(value, plain[key])  # frozen ones have no moments
            assert kind == "param"
            np.testing.assert_array_equal(ours.after[key], value)
    assert ours.losses[-1] < ours.losses[0]
    other = lora_job().model_copy(update={"seed": 2})
    key = "param.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not np.array_equal(run(other, Layout(), 0).before[key], ours.before[key])


LAYOUTS: list[tuple[dict[str, Any], Layout]] = [
    ({"data": "ddp"}, Layout(dp_replicate=2)),
    ({"data": "zero1"}, Layout(dp_shard=3)),
    ({"data": "zero2"}, Layout(dp_replicate=2, dp_shard=2)),
    ({"data": "zero3"}, Layout(dp_shard=3)),
    ({"data": "zero3", "reshard_after_forward": True}, Layout(dp_shard=2)),
    ({"data": "hsdp"}, Layout(dp_replicate=2, dp_shard=2)),
    ({}, Layout(tp=2)),
    ({"pipeline": "1f1b"}, Layout(pp=2)),
    ({"pipeline": "interleaved_1f1b", "data": "zero3"}, Layout(pp=2, dp_shard=2)),
    ({"context": "gather"}, Layout(cp=2)),
    ({"data": "zero3", "training": {"recompute": "full"}}, Layout(dp_shard=2, tp=2)),
]
TIED = {"tie_word_embeddings": True, "vocab_size": 131, "qkv_bias": True}


def row(settings: dict[str, Any], **training: Any) -> Job:
    training = {"ema_decay": 0.9} | settings.get("training", {}) | training
    parallel = {name: value for name, value in settings.items() if name != "training"}
    # B begins as zeros: with a small eps its first step would have the signs of gradients, which may be of rounding.
    optimizer = {"clip_norm": 0.5, "eps": 1e-3, "learning_rate": 1e-2}
    return lora_job(model=TIED, training=training, parallel=parallel, optimizer=optimizer)


@lru_cache
def truth() -> Run:
    return run(row({}), Layout(), STEPS, masked=0.6)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "layout"), LAYOUTS, ids=str)
def test_every_layout_trains_the_same_adapters(settings: dict[str, Any], layout: Layout) -> None:
    actual, expected = run(row(settings), layout, STEPS, masked=0.6), truth()
    assert actual.before.keys() == expected.before.keys()
    for key, value in expected.before.items():
        np.testing.assert_array_equal(actual.before[key], value, err_msg=key)
        if ".lora_" not in key:
            np.testing.assert_array_equal(actual.after[key], value, err_msg=key)
    assert_same_steps(actual, expected, FLOAT32)


@pytest.mark.slow
def test_exact_sums_are_the_same_bits() -> None:
    one, four = (
        run(row({"data": data}, determinism="exact"), layout, STEPS, masked=0.6)
        for data, layout in (("ddp", Layout()), ("zero3", Layout(pp=2, dp_shard=2)))
    )
    assert one.metrics == four.metrics
    for key, value in one.after.items():
        np.testing.assert_array_equal(four.after[key], value, err_msg=key)


@pytest.mark.slow
def test_frozen_weights_in_bf16_compute_what_float32_masters_would() -> None:
    """B is zero at first: the loss of the first step is that of the model without adapters, to the last bit."""
    bf16 = {"training": {"precision": "bf16"}}
    plain = run(small_job(**bf16), Layout(), 1)
    whole = run(lora_job(**bf16), Layout(), STEPS)
    assert whole.losses[0] == plain.losses[0]
    key = "param.model.layers.0.mlp.up_proj.weight"
    rounded = torch.from_numpy(plain.before[key]).bfloat16().float().numpy()
    assert not np.array_equal(rounded, plain.before[key])
    for data in ("zero1", "zero2", "zero3"):
        cut = run(lora_job(**bf16, parallel={"data": data}), Layout(dp_shard=2), STEPS)
        np.testing.assert_array_equal(cut.after[key], rounded)
        np.testing.assert_allclose(cut.losses, whole.losses, rtol=2e-3)
        np.testing.assert_allclose(cut.norms, whole.norms, rtol=5e-2)
