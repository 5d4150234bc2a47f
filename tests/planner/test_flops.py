"""Rules of thumb with the published arithmetic, and the exact count against torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.config.presets import PRESETS
from elastic_train.model.lora import apply_lora
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.recompute import recompute_attention, recompute_blocks
from elastic_train.planner.flops import (
    DAY,
    computed_tokens,
    forward_flops,
    hardware_flops_per_token,
    model_flops_per_token,
    seconds_for,
    seen_keys,
    six_pd,
    tokens_per_step,
    utilisation,
)
from tests.training.synthetic import small_job

UNEVEN: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 10, "intermediate_size": 100}


def test_the_published_arithmetic() -> None:
    """70e9 parameters, 1.4e12 tokens, 25 PFLOP/s sustained: 5.88e23 operations, about 272 days."""
    flops = six_pd(70e9, 1.4e12)
    assert flops == pytest.approx(5.88e23)
    assert seconds_for(flops, 25e15) / DAY == pytest.approx(272, abs=0.5)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"must be more than 0"):
        seconds_for(1e20, rate)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [{}, UNEVEN], ids=["small", "uneven"])
def test_the_exact_count_is_torchs(model: dict[str, Any], recompute: str) -> None:
    """Attention in full, as torch counts it; with the flash kernel."""
    job = small_job(model=model, training={"recompute": recompute})
    tokens = 2 * job.data.sequence_length
    forward, step = counted(job, sequences=2)
    assert forward == tokens * forward_flops(job.model, job.data.sequence_length).total
    assert forward + step == tokens * hardware_flops_per_token(job, job.data.sequence_length)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj", "down_proj"), "all-linear"], ids=str)
def test_frozen_matrices_have_no_gradients(targets: Any, recompute: str) -> None:
    """Torch's count, and what it leaves out in the first block, whose input is frozen: the gradient of that."""
    job = small_job(lora={"rank": 5, "target_modules": targets}, training={"recompute": recompute})
    model, lora = job.model, job.lora
    assert lora is not None
    adapted = len({"q_proj", "k_proj", "v_proj"} & set(lora.targets))
    spared = 2 * model.hidden_size * (64 + 32 + 32 + adapted * lora.rank)
    forward, backward = counted(job, sequences=2)
    tokens = 2 * job.data.sequence_length
    assert forward == tokens * forward_flops(model, job.data.sequence_length, lora).total
    assert forward + backward == tokens * (hardware_flops_per_token(job, job.data.sequence_length) - spared)


def counted(job: Job, sequences: int) -> tuple[int, int]:
    """Operations of the forward and of the backward pass of the real model."""
    model = Transformer(job.model)
    apply_lora(model, job.lora)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if job.training.recompute == "selective":
        recompute_attention(model)
    if job.training.recompute == "full":
        recompute_blocks(model)
    ids = torch.randint(0, job.model.vocab_size, (sequences, job.data.sequence_length))
    aten = torch.ops.aten
    # torch knows its formulas for the kernels of other devices only.
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
            *shapes[:4]
        ),
    }
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with FlopCounterMode(display=False, custom_mapping=kernels) as forward:
            loss = model(ids).square().mean()
        with FlopCounterMode(display=False, custom_mapping=kernels) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_a_causal_query_sees_half_of_the_keys() -> None:
    job = small_job(data={"sequence_length": 4})
    full, causal = (forward_flops(job.model, keys) for keys in (4, seen_keys(4, "causal")))
    assert causal.attention / full.attention == (1 + 2 + 3 + 4) / 16
    assert (causal.projections, causal.feed_forward, causal.head) == (full.projections, full.feed_forward, full.head)


def test_six_pd_is_near_the_exact_count_of_large_models() -> None:
    """Llama 3 405B at 8,192 tokens: attention adds 8 % in full, and 3.6 % if causal; its embedding takes 0.5 % off."""
    model = ModelConfig.model_validate(PRESETS["llama3-405b"])
    six = six_pd(model.num_parameters, 1)
    assert 3 * forward_flops(model, 8192).total / six == pytest.approx(1.078, abs=2e-3)
    assert 3 * forward_flops(model, seen_keys(8192, "causal")).total / six == pytest.approx(1.036, abs=2e-3)


def test_a_tied_head_is_multiplied_with_all_the_same() -> None:
    tied, untied = (small_job(model={"tie_word_embeddings": tied}) for tied in (True, False))
    assert model_flops_per_token(tied, "full") == model_flops_per_token(untied, "full")


def test_padding_is_computed_and_does_not_count() -> None:
    """8 slots over 3 data ranks are 3 micro-batches each, one of the nine for nothing."""
    job, layout = small_job(), Layout(dp_shard=3)
    assert computed_tokens(job, layout) / tokens_per_step(job) == 9 / 8
    even = utilisation(job, Layout(dp_shard=4), seconds=1.0, peak=1e9)
    uneven = utilisation(job, layout, seconds=1.0, peak=1e9)
    assert uneven.mfu / even.mfu == pytest.approx(4 / 3)
    assert uneven.hfu / even.hfu == pytest.approx(4 / 3 * 9 / 8)
    assert even.mfu_causal < even.hfu
    assert even.mfu_causal < even.mfu
