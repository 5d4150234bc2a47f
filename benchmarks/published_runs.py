"""Published runs beside what the planner says of them.

    python -m benchmarks.published_runs

Tokens per second and accelerator are those of torchtitan's ``docs/performance.md`` and ``benchmarks/`` (H100 of 500 W
with torch.compile, TP without async TP), with default speeds. MFU are those of Llama 3 (arXiv:2407.21783, table 4;
attention over 131,072 tokens counted causal: in full it would be more than half of all operations, and 53 % come out)
and of Megatron-LM (arXiv:2205.05198, table 5, selective recomputation; a feed-forward of 4 h as SwiGLU of 8 h / 3),
whose stacks have kernels of their own: ``OWN_KERNELS``. ``tests/planner/test_published_runs.py`` holds the planner to
``off``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.presets import PRESETS
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.step_time import step_time
from tests.training.synthetic import small_job

OWN_KERNELS = {"a100-80gb": 0.68, "h100-80gb": 0.58}
"""Efficiencies of Megatron-LM, and of Meta's training of Llama 3, whose attention knows its masks."""
POINTS = 0.05
_TITAN_BYTES_PER_SECOND = {"h100-80gb": 2.4e12}
"""Of HBM2e, which the H100 of those tables have (and 500 W)."""


def job_of(model: dict[str, Any], sequence: int, training: dict[str, Any], device: str, **parallel: Any) -> Job:
    return small_job(
        model=model,
        data={"sequence_length": sequence},
        training={"precision": "bf16", **training},
        parallel=parallel,
        hosts={"device": device},
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """A run of torchtitan. ``published``: tokens per second and accelerator; ``off``: the largest relative error."""

    chip: str
    model: str
    layout: Layout
    per_data_rank: int
    published: float
    off: float
    recompute: str = "selective"
    precision: str = "bf16"
    compiled: bool = True

    @property
    def name(self) -> str:
        kind = {"h100-80gb": "H100 (500 W, 2.4 TB/s)", "h200": "H200", "a100-80gb": "A100"}[self.chip]
        sizes = f"FSDP {self.layout.dp_shard}" + (f" x TP {self.layout.tp}" if self.layout.tp > 1 else "")
        how = (", fp8" if self.precision == "fp8" else "") + ("" if self.compiled else ", without compile")
        return f"{kind}, {self.model.removeprefix('llama3-').upper()}, {sizes}{how}"

    def planned(self) -> float:
        training = {
            "global_batch": self.per_data_rank * self.layout.data_ranks,
            "micro_batch": self.per_data_rank,
            "recompute": self.recompute,
            "precision": self.precision,
            "compile": self.compiled,
        }
        job = job_of(PRESETS[self.model], 8192, training, "cuda", data="zero3", reshard_after_forward=True)
        chip = accelerator(self.chip)
        memory = _TITAN_BYTES_PER_SECOND.get(self.chip, chip.memory_bytes_per_second)
        chip = replace(chip, memory_bytes_per_second=memory)
        return step_time(job, self.layout, chip).tokens_per_second / self.layout.world_size


@dataclass(frozen=True, slots=True)
class Utilisation:
    """A run with kernels of its own. ``published``: MFU; ``off``: the largest difference. ``stages`` on a rank."""

    name: str
    chip: Accelerator
    model: dict[str, Any]
    layout: Layout
    stages: int
    sequences: int
    published: float
    sequence: int = 2048
    data: str = "ddp"
    training: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    off: float = POINTS

    def planned(self) -> float:
        training = {"global_batch": self.sequences, **self.training}
        parallel = {"pipeline": "interleaved_1f1b", "virtual_stages": self.stages} if self.stages > 1 else {}
        job = job_of(self.model, self.sequence, training, "cpu", data=self.data, **parallel)
        use = step_time(job, self.layout, self.chip, OWN_KERNELS[self.chip.name]).use
        return use.mfu_causal if self.causal else use.mfu


def _llama_405b(name: str, layout: Layout, per_data_rank: int, published: float, sequence: int = 8192) -> Utilisation:
    """126 layers on 16 ranks: about one per virtual stage, so 7 stages a rank (112)."""
    chip = replace(accelerator("h100-80gb"), masked_attention=1.0)
    sequences = per_data_rank * layout.data_ranks
    model = PRESETS["llama3-405b"]
    return Utilisation(name, chip, model, layout, 7, sequences, published, sequence, "zero1", causal=sequence > 8192)


def _megatron(
    name: str,
    hidden: int,
    heads: int,
    layers: int,
    sequences: int,
    stages: int,
    layout: Layout,
    published: float,
    off: float = POINTS,
) -> Utilisation:
    model = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 8 * hidden // 3 // 8 * 8,
        "vocab_size": 51_200,
    }
    chip, training = accelerator("a100-80gb"), {"recompute": "selective"}
    return Utilisation(name, chip, model, layout, stages, sequences, published, training=training, off=off)


H100, H200, A100 = "h100-80gb", "h200", "a100-80gb"
RATES = (
    Rate(H100, "llama3-8b", Layout(dp_shard=8), 2, 6667, 0.05),
    Rate(H100, "llama3-8b", Layout(dp_shard=128), 2, 6514, 0.05),
    Rate(H100, "llama3-8b", Layout(dp_shard=8, tp=8), 12, 4378, 0.22),
    Rate(H100, "llama3-70b", Layout(dp_shard=32, tp=8), 16, 597, 0.08, recompute="full"),
    Rate(H100, "llama3-405b", Layout(dp_shard=16, tp=8), 2, 109, 0.05, recompute="full"),
    Rate(H100, "llama3-8b", Layout(dp_shard=8), 2, 8532, 0.05, precision="fp8"),
    Rate(H100, "llama3-8b", Layout(dp_shard=128), 2, 8380, 0.05, precision="fp8"),
    Rate(H100, "llama3-8b", Layout(dp_shard=8), 2, 5762, 0.12, compiled=False),
    Rate(H200, "llama3-8b", Layout(dp_shard=32), 2, 10_938, 0.05, precision="fp8"),
    Rate(H200, "llama3-8b", Layout(dp_shard=64), 2, 10_753, 0.05, precision="fp8"),
    Rate(A100, "llama3-8b", Layout(dp_shard=64), 1, 2973, 0.08, compiled=False),
    Rate(A100, "llama3-70b", Layout(dp_shard=64), 1, 331, 0.08, recompute="full", compiled=False),
)
UTILISATIONS = (
    _llama_405b("Llama 3 405B, 8,192 H100", Layout(pp=16, dp_shard=64, tp=8), 32, 0.43),
    _llama_405b("Llama 3 405B, 16,384 H100", Layout(pp=16, dp_shard=128, tp=8), 16, 0.41),
    _llama_405b("the same, 131,072 tokens, causal", Layout(pp=16, dp_shard=8, cp=16, tp=8), 16, 0.38, 131_072),
    _megatron("Megatron-LM 22B, 8 A100", 6144, 64, 48, 4, 1, Layout(tp=8), 0.415, off=0.06),
    _megatron("Megatron-LM 175B, 64 A100", 12_288, 96, 96, 64, 3, Layout(pp=8, tp=8), 0.514),
    _megatron("Megatron-LM 530B, 280 A100", 20_480, 128, 105, 280, 3, Layout(pp=35, tp=8), 0.560),
    _megatron("Megatron-LM 1T, 512 A100", 25_600, 160, 128, 512, 2, Layout(pp=64, tp=8), 0.563),
)


def rate_rows() -> list[str]:
    rows = ["| tokens/s and accelerator | published | planner | |", "|---|---|---|---|"]
    for run in RATES:
        rate = run.planned()
        off = round(100 * (rate / run.published - 1))
        rows.append(f"| {run.name} | {run.published:,.0f} | {rate:,.0f} | {off:+d} % |")
    return rows


def utilisation_rows() -> list[str]:
    rows = ["| MFU | published | planner |", "|---|---|---|"]
    rows += [f"| {run.name} | {100 * run.published:.1f} % | {100 * run.planned():.1f} % |" for run in UTILISATIONS]
    return rows


def main() -> None:
    print("\n".join([*rate_rows(), "", *utilisation_rows()]))


if __name__ == "__main__":
    main()
