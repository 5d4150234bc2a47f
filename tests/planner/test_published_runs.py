"""Published runs: what the planner says of them. They check time alone: memory, and whether it would fit, is not asked.

The default efficiencies are those of plain PyTorch (torchtitan). Stacks with kernels of their own reach more, and say
how far a fixed share of the peak carries: large models come out within five points; the same share is too much for
small matrices (22B of the Megatron-LM table, 41.5 % published, comes out at 51 %).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.presets import PRESETS
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.step_time import step_time
from tests.training.synthetic import small_job

OWN_KERNELS = {"a100-80gb": 0.68, "h100-80gb": 0.58}
"""Efficiencies of Megatron-LM, and of Meta's training of Llama 3, whose attention knows its masks."""
META = replace(accelerator("h100-80gb"), masked_attention=1.0)
TITAN = {"h100-80gb": 2.4e12}
"""Bytes per second of HBM2e, which the H100 of those tables have (and 500 W)."""
POINTS = 0.05
"""Largest difference of an MFU."""


def job(
    model: dict[str, Any],
    sequence: int,
    training: dict[str, Any],
    data: str,
    stages: int | None,
    device: str = "cpu",
    **parallel: Any,
) -> Job:
    """``stages`` per rank, interleaved; None: no pipeline."""
    if stages is not None:
        parallel |= {"pipeline": "interleaved_1f1b", "virtual_stages": stages}
    return small_job(
        model=model,
        data={"sequence_length": sequence},
        training={"precision": "bf16", **training},
        parallel={"data": data, **parallel},
        hosts={"device": device},
    )


def llama_405b(layout: Layout, per_data_rank: int, sequence: int) -> float:
    """MFU with causal attention. 126 layers on 16 ranks: about one per virtual stage, so 7 stages a rank (112)."""
    sequences = per_data_rank * layout.data_ranks
    asked = job(PRESETS["llama3-405b"], sequence, {"global_batch": sequences}, "zero1", 7)
    use = step_time(asked, layout, META, OWN_KERNELS["h100-80gb"]).use
    return use.mfu_causal if sequence > 8192 else use.mfu


@pytest.mark.parametrize(
    ("layout", "per_data_rank", "sequence", "published"),
    [
        (Layout(pp=16, dp_shard=64, tp=8), 32, 8192, 0.43),
        (Layout(pp=16, dp_shard=128, tp=8), 16, 8192, 0.41),
        (Layout(pp=16, dp_shard=8, cp=16, tp=8), 16, 131_072, 0.38),
    ],
    ids=str,
)
def test_llama_3_405b(layout: Layout, per_data_rank: int, sequence: int, published: float) -> None:
    """arXiv:2407.21783, table 4: 8,192 and 16,384 H100. Attention over 131,072 tokens is counted causal: in full it
    would be more than half of all operations, and 53 % come out.
    """
    assert llama_405b(layout, per_data_rank, sequence) == pytest.approx(published, abs=POINTS)


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "layers", "sequences", "stages", "layout", "published"),
    [
        ("175B", 12_288, 96, 96, 64, 3, Layout(pp=8, tp=8), 0.514),
        ("530B", 20_480, 128, 105, 280, 3, Layout(pp=35, tp=8), 0.560),
        ("1T", 25_600, 160, 128, 512, 2, Layout(pp=64, tp=8), 0.563),
    ],
)
def test_megatron_lm(
    name: str, hidden: int, heads: int, layers: int, sequences: int, stages: int, layout: Layout, published: float
) -> None:
    """arXiv:2205.05198, table 5, A100, selective recomputation; a feed-forward of 4 h as SwiGLU of 8 h / 3."""
    model = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 8 * hidden // 3 // 8 * 8,
        "vocab_size": 51_200,
    }
    asked = job(model, 2048, {"global_batch": sequences, "recompute": "selective"}, "ddp", stages)
    time = step_time(asked, layout, accelerator("a100-80gb"), OWN_KERNELS["a100-80gb"])
    assert time.mfu == pytest.approx(published, abs=POINTS)


@pytest.mark.parametrize(
    ("chip", "model", "layout", "per_data_rank", "training", "published", "off"),
    [
        ("h100-80gb", "llama3-8b", Layout(dp_shard=8), 2, {"recompute": "selective"}, 6667, 0.05),
        ("h100-80gb", "llama3-8b", Layout(dp_shard=128), 2, {"recompute": "selective"}, 6514, 0.05),
        ("h100-80gb", "llama3-8b", Layout(dp_shard=8, tp=8), 12, {"recompute": "selective"}, 4378, 0.22),
        ("h100-80gb", "llama3-70b", Layout(dp_shard=32, tp=8), 16, {"recompute": "full"}, 597, 0.08),
        ("h100-80gb", "llama3-405b", Layout(dp_shard=16, tp=8), 2, {"recompute": "full"}, 109, 0.05),
        ("h100-80gb", "llama3-8b", Layout(dp_shard=8), 2, {"recompute": "selective", "precision": "fp8"}, 8532, 0.05),
        ("h100-80gb", "llama3-8b", Layout(dp_shard=128), 2, {"recompute": "selective", "precision": "fp8"}, 8380, 0.05),
        ("h200", "llama3-8b", Layout(dp_shard=32), 2, {"recompute": "selective", "precision": "fp8"}, 10_938, 0.05),
        ("h200", "llama3-8b", Layout(dp_shard=64), 2, {"recompute": "selective", "precision": "fp8"}, 10_753, 0.05),
        ("a100-80gb", "llama3-8b", Layout(dp_shard=64), 1, {"recompute": "selective"}, 2973, 0.08),
        ("a100-80gb", "llama3-70b", Layout(dp_shard=64), 1, {"recompute": "full"}, 331, 0.08),
    ],
)
def test_torchtitan(
    chip: str,
    model: str,
    layout: Layout,
    per_data_rank: int,
    training: dict[str, Any],
    published: float,
    off: float,
) -> None:
    """Tokens per second and accelerator, of torchtitan's ``docs/performance.md`` and ``benchmarks/`` (H100 of 500 W
    with torch.compile, TP without async TP; without compile 8B is 14 % slower: 5,762 on 8), with default speeds.
    """
    training = training | {"global_batch": per_data_rank * layout.data_ranks, "micro_batch": per_data_rank}
    training |= {"compile": chip != "a100-80gb"}
    asked = job(PRESETS[model], 8192, training, "zero3", None, device="cuda", reshard_after_forward=True)
    known = accelerator(chip)
    known = replace(known, memory_bytes_per_second=TITAN.get(chip, known.memory_bytes_per_second))
    rate = step_time(asked, layout, known).tokens_per_second / layout.world_size
    assert rate == pytest.approx(published, rel=off)
