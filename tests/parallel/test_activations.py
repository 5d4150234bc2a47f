"""Saved bytes against arithmetic: the paper's formula for the paper's block, ours for ours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.config.presets import PRESETS
from elastic_train.planner.activations import Recompute, block_bytes, mask_bytes, paper_block_bytes
from tests.parallel.saved_bytes import block_saves, rank_saves, saved_bytes
from tests.ranks import run_ranks
from tests.training.synthetic import small_job

MIB = 2**20


class PaperBlock(nn.Module):
    """The block of arXiv:2205.05198: LayerNorm, attention and GELU MLP of width 4h, with dropout; s, b, h, a there."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + _dropout(self.out(self._attention(self.norms[0](x_BTD))))
        return x_BTD + _dropout(self.down(F.gelu(self.up(self.norms[1](x_BTD)))))

    def _attention(self, x_BTD: Tensor) -> Tensor:
        # Three projections of one input: q, k and v are tensors of their own, as in the paper's count.
        q, k, v = (
            F.linear(x_BTD, w, b).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for w, b in zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        return (_dropout(scores.softmax(dim=3)) @ v).transpose(1, 2).flatten(2)


def _dropout(x: Tensor) -> Tensor:
    """Keeps a mask of one byte per element; ``F.dropout`` on cpu keeps one in the dtype of ``x``."""
    out: Tensor = torch.native_dropout(x, 0.1, True)[0]
    return out


@pytest.mark.parametrize(("s", "b", "h", "a"), [(64, 2, 64, 4), (256, 1, 64, 8), (32, 3, 256, 2)])
def test_the_papers_block_keeps_what_the_paper_says(s: int, b: int, h: int, a: int) -> None:
    """The paper leaves out the statistics of the norms: mean and deviation of 2 norms, of 2 bytes each here."""
    block = PaperBlock(h, a).bfloat16()
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    measured = saved_bytes(lambda: block(x), block.parameters())
    formula = paper_block_bytes(sequence=s, batch=b, hidden=h, heads=a)
    assert measured == formula + 2 * 2 * 2 * s * b
    assert measured == pytest.approx(formula, rel=0.005)


def test_numbers_of_the_paper_at_4096() -> None:
    """s = 4096, b = 1, h = 4096, a = 32: 34 sbh = 544 MiB, 5 a s^2 b = 2560 MiB, 2 sbh = 32 MiB."""
    shape = {"sequence": 4096, "batch": 1, "hidden": 4096, "heads": 32}
    none, selective, full = (paper_block_bytes(**shape, recompute=mode) for mode in ("none", "selective", "full"))
    assert (none / MIB, selective / MIB, full / MIB) == (544 + 2560, 544, 32)
    assert paper_block_bytes(**shape, tensor=8) == none / 8


def test_with_flash_attention_selective_saves_little_and_full_much() -> None:
    model = ModelConfig(**PRESETS["llama3-8b"])
    none, selective, full = (
        sum(
            block_bytes(
                model, Layout(), sequence=4096, batch=1, number_bytes=2, recompute=mode, fused_norm=True
            ).values()
        )
        for mode in ("none", "selective", "full")
    )
    assert selective < none < 1.1 * selective
    assert full == 32 * MIB and full <= none / 8


def job(recompute: Recompute, *, documents: bool = False, context: str = "gather", **model: Any) -> Job:
    """Sizes that no two terms share."""
    shape = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 112}
    return small_job(
        model=shape | {"head_dim": 10} | model,
        data={"sequence_length": 96, "document_mask": documents},
        training={"micro_batch": 2, "recompute": recompute},
        parallel={"context": context},
    )


def expected(job: Job, layout: Layout, kernel: Any, dtype: torch.dtype) -> int:
    terms = block_bytes(
        job.model,
        layout,
        sequence=96,
        batch=2,
        number_bytes=dtype.itemsize,
        recompute=job.training.recompute,
        context=job.parallel.context,
        kernel=kernel,
        documents=job.data.document_mask,
    )
    return sum(terms.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_block_keeps_exactly_what_is_computed(
    documents: bool, recompute: Recompute, kernel: str, dtype: torch.dtype
) -> None:
    work = job(recompute, documents=documents)
    assert block_saves(work, Layout(), None, kernel, dtype) == expected(work, Layout(), kernel, dtype)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_under_a_mask_keys_and_values_are_kept_as_they_are_repeated(recompute: Recompute) -> None:
    """As on cuda, where torch has no kernel that takes a mask and grouped heads but the one that keeps S^2 numbers."""
    work = job(recompute, documents=True)
    saved = block_saves(work, Layout(), None, "repeated", torch.bfloat16)
    assert saved == expected(work, Layout(), "repeated", torch.bfloat16)
    fewer = expected(work, Layout(), "flash", torch.bfloat16)
    assert saved - fewer == (2 * 4 * 10 * 2 * 96 * 2 if recompute == "none" else 0)


def test_repeated_keys_and_values_of_context_ranks() -> None:
    """Without documents rank 0 needs no mask for its first chunk: here it keeps most."""
    cases = [(context, documents) for context in ("gather", "ulysses") for documents in (False, True)]
    jobs = [job("none", documents=documents, context=context) for context, documents in cases]
    saved = run_ranks(rank_saves, 2, jobs, Layout(cp=2), ["repeated"] * 4, ["bfloat16"] * 4)
    for (context, documents), work, each in zip(cases, jobs, zip(*saved, strict=True), strict=True):
        kernel = "repeated" if documents or context == "gather" else "flash"
        assert max(each) == expected(work, Layout(cp=2), kernel, torch.bfloat16), (context, documents)
        assert (each[0] == each[1]) == (documents or context == "ulysses")


def test_heads_that_are_not_grouped() -> None:
    for kernel in ("flash", "math"):
        work = job("none", num_key_value_heads=8)
        saved = block_saves(work, Layout(), None, kernel, torch.float32)
        assert saved == expected(work, Layout(), kernel, torch.float32)


@pytest.mark.parametrize("context", ["gather", "ulysses"])
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(tp=2), Layout(cp=2, tp=2), Layout(cp=4)], ids=str)
def test_a_block_of_a_layout_keeps_exactly_what_is_computed(layout: Layout, context: str) -> None:
    jobs = [job(mode, documents=True, context=context) for mode in ("none", "none", "selective", "full")]
    kernels, dtypes = ["flash", "math", "flash", "flash"], ["bfloat16", "float32", "float32", "bfloat16"]
    cases = zip(jobs, kernels, dtypes, strict=True)
    computed = [expected(work, layout, kernel, getattr(torch, dtype)) for work, kernel, dtype in cases]
    for saved in run_ranks(rank_saves, layout.world_size, jobs, layout, kernels, dtypes):
        assert saved == computed


def test_masks() -> None:
    whole = {"sequence": 96, "batch": 2, "number_bytes": 2}
    assert mask_bytes(Layout(), documents=False, **whole) == 0
    assert mask_bytes(Layout(), documents=True, **whole) == 2 * 96 * 96 * 2
    assert mask_bytes(Layout(cp=2), documents=True, context="ulysses", **whole) == 2 * 96 * 96 * 2
    # Chunks of 24 tokens; rank 1 holds chunks 1 and 2, whose queries see 48 and 72 keys.
    assert mask_bytes(Layout(cp=2), documents=False, **whole) == 24 * (48 + 72) * 2
