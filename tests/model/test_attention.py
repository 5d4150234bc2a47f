"""Attention against softmax written out, and what documents do to places, masks and losses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from elastic_train.config.model import ModelConfig
from elastic_train.model import attention
from elastic_train.model.attention import AttentionCore, Context, attend
from elastic_train.model.rotary import Rotary, rotate

CONFIG = ModelConfig(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=50,
)
PACK = torch.tensor([[0, 0, 0, 0, 1, 1]])
"""[A B C EOS][D E]"""


def context_of(length: int, documents_BS: Tensor | None = None, indices_T: Tensor | None = None) -> Context:
    return Context(Rotary(CONFIG), length, torch.device("cpu"), documents_BS, indices_T)


def numbers(length: int, heads: int, seed: int) -> Tensor:
    return torch.randn(2, heads, length, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, seen_BTS: Tensor) -> Tensor:
    """Query head i uses key/value head i // (query heads / key/value heads)."""
    group = q_BHTE.shape[1] // k_BHSE.shape[1]
    k_BHSE, v_BHSE = (x.repeat_interleave(group, dim=1) for x in (k_BHSE, v_BHSE))
    scores = q_BHTE @ k_BHSE.transpose(2, 3) / math.sqrt(8)
    weights = torch.exp(scores - scores.amax(dim=3, keepdim=True)) * seen_BTS[:, None]
    return weights / weights.sum(dim=3, keepdim=True) @ v_BHSE


def seen_of(documents_BS: Tensor | None, length: int) -> Tensor:
    seen = torch.tensor([[key <= query for key in range(length)] for query in range(length)])[None]
    if documents_BS is not None:
        seen = seen & (documents_BS[:, :, None] == documents_BS[:, None, :])
    return seen


DOCUMENTS = {
    "none": None,
    "one": torch.zeros(2, 24, dtype=torch.int64),
    "different rows": torch.tensor([[0] * 5 + [1] * 19, [0] * 12 + [1] * 11 + [2]]),
    "single tokens": torch.arange(24).expand(2, -1),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_core_equals_softmax(documents: str) -> None:  # HF-11
    documents_BS = DOCUMENTS[documents]
    q, k, v = numbers(24, 8, 1), numbers(24, 2, 2), numbers(24, 2, 3)
    actual = AttentionCore()(q, k, v, context_of(24, documents_BS))
    torch.testing.assert_close(actual, reference(q, k, v, seen_of(documents_BS, 24)), rtol=1e-12, atol=1e-12)


def test_repeated_heads_attend_as_grouped_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on devices without a kernel for grouped heads under masks."""
    q, k, v = (numbers(24, heads, seed).requires_grad_() for heads, seed in ((8, 1), (2, 2), (2, 3)))
    documents_BS = DOCUMENTS["different rows"]

    def attended() -> tuple[Tensor, ...]:
        out = AttentionCore()(q, k, v, context_of(24, documents_BS))
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    grouped = attended()
    monkeypatch.setattr(attention, "_GROUPS_UNDER_MASKS", ())
    torch.testing.assert_close(attended(), grouped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("start", "end"), [(0, 6), (6, 12), (23, 24)])
def test_some_queries_over_the_keys_before_their_end(documents: str, start: int, end: int) -> None:
    documents_BS = DOCUMENTS[documents]
    q, k, v = numbers(24, 8, 1), numbers(24, 2, 2), numbers(24, 2, 3)
    actual = attend(q[:, :, start:end], k, v, context_of(24, documents_BS), start=start)
    expected = reference(q, k, v, seen_of(documents_BS, 24))[:, :, start:end]
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_positions_start_anew_with_each_document() -> None:
    """LOSS-10: [A B C EOS][D E] has positions 0 1 2 3 0 1."""
    x = numbers(6, 8, 1)[:1].float()
    cos_TE, sin_TE = Rotary(CONFIG).tables(6, torch.device("cpu"))
    positions = torch.tensor([0, 1, 2, 3, 0, 1])
    expected = rotate(x, cos_TE[positions], sin_TE[positions])
    assert torch.equal(context_of(6, PACK).rotate(x), expected)
    held = torch.tensor([1, 4, 5])
    assert torch.equal(context_of(6, PACK, held).rotate(x[:, :, held]), expected[:, :, held])


def test_places_of_held_tokens_without_documents() -> None:
    x, held = numbers(6, 8, 1).float(), torch.tensor([1, 4, 5])
    assert torch.equal(context_of(6, None, held).rotate(x[:, :, held]), context_of(6).rotate(x)[:, :, held])


def test_a_mask_is_made_once_per_place_and_dtype() -> None:
    context = context_of(6, PACK)
    mask = context.mask(2, 6, torch.float32)
    assert context.mask(2, 6, torch.float32) is mask
    assert context.mask(2, 6, torch.bfloat16).dtype == torch.bfloat16
    rows = ["0 0 0 - - -", "0 0 0 0 - -", "- - - - 0 -", "- - - - 0 0"]
    hidden = [[cell == "-" for cell in row.split()] for row in rows]
    assert mask.shape == (1, 1, 4, 6)
    assert torch.equal(mask[0, 0], torch.zeros(4, 6).masked_fill(torch.tensor(hidden), -math.inf))
