"""The loss over a cut vocabulary against ``F.cross_entropy`` over all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.parallel.exchanges import vocabulary_loss
from tests.ranks import run_ranks

RANDOM = np.random.default_rng(0)
BATCH, TOKENS = 2, 5


def sample(vocabulary: int, spread: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels of which the first two of each row do not count; first and last token id occur."""
    logits_BTV = (spread * RANDOM.standard_normal((BATCH, TOKENS, vocabulary))).astype(np.float32)
    labels_BT = RANDOM.integers(0, vocabulary, (BATCH, TOKENS))
    labels_BT[:, :2] = -100
    labels_BT[0, 2], labels_BT[1, 2] = 0, vocabulary - 1
    return logits_BTV, labels_BT


def reference(logits_BTV: np.ndarray, labels_BT: np.ndarray, scale: float) -> tuple[float, np.ndarray]:
    """In float64."""
    logits = torch.from_numpy(logits_BTV).double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels_BT).flatten(), reduction="sum")
    (scale * loss).backward()
    assert logits.grad is not None
    return loss.item(), logits.grad.numpy()


def check(logits: np.ndarray, labels: np.ndarray, ranks: int, scale: float = 1.0) -> None:
    expected, expected_gradient = reference(logits, labels, scale)
    results = run_ranks(vocabulary_loss, ranks, logits, labels, torch.float32, scale)
    assert len({loss for loss, *_ in results}) == 1, "ranks differ"
    assert results[0][0] == pytest.approx(expected, rel=1e-6)
    gradient = np.concatenate([part for _, part, _, _ in results], axis=2)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6 * scale)


# 10 columns over 3 ranks: 4, 4, 2; 9 over 4: 3, 3, 3, 0; 5 over 4: 2, 2, 1, 0.
@pytest.mark.parametrize(("vocabulary", "ranks"), [(12, 2), (10, 3), (9, 4), (5, 4), (7, 1)])
def test_loss_and_gradient(vocabulary: int, ranks: int) -> None:
    check(*sample(vocabulary), ranks, scale=0.25)


def test_extreme_logits() -> None:
    """exp(10,000) overflows any float: the maximum over all ranks is taken off first."""
    check(*sample(10, spread=1e4), ranks=3)


def test_no_valid_token_gives_exactly_zero() -> None:
    logits, labels = sample(10)
    for loss, gradient, _, _ in run_ranks(vocabulary_loss, 3, logits, np.full_like(labels, -100), torch.float32, 1.0):
        assert loss == 0.0
        assert not gradient.any()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits, labels = sample(10)
    rounded = torch.from_numpy(logits).bfloat16().float().numpy()
    expected, expected_gradient = reference(rounded, labels, 1.0)
    results = run_ranks(vocabulary_loss, 3, logits, labels, torch.bfloat16, 1.0)
    assert results[0][0] == pytest.approx(expected, rel=1e-6)
    gradient = np.concatenate([part for _, part, _, _ in results], axis=2)
    # Only the result is rounded: eight bits, so 2^-9 relative.
    np.testing.assert_allclose(gradient, expected_gradient, rtol=2**-8, atol=1e-7)
    assert all(dtype == torch.bfloat16 for _, _, dtype, _ in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_float32_tensor_is_kept_for_backward(dtype: torch.dtype) -> None:
    results = run_ranks(vocabulary_loss, 3, *sample(10), dtype, 1.0)
    for (_, _, _, kept), width in zip(results, (4, 4, 2), strict=True):
        assert kept == [(torch.float32, (BATCH, TOKENS, width))]


def test_not_a_number_is_not_hidden() -> None:
    logits, labels = sample(10)
    logits[0, 3, 9] = np.nan
    assert all(np.isnan(loss) for loss, *_ in run_ranks(vocabulary_loss, 3, logits, labels, torch.float32, 1.0))
