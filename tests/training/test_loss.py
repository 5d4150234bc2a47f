from __future__ import annotations

import torch

from elastic_train.training.loss import TokenLoss


def logits_with_losses(losses: list[float]) -> torch.Tensor:
    """Two classes; the cross entropy of class 0 at position i is ``losses[i]``."""
    probability = torch.tensor(losses, dtype=torch.float64).neg().exp()
    return torch.stack((probability.log(), (1 - probability).log()), dim=-1)[None].float()


def test_micro_batches_add_up_to_sum_over_valid() -> None:
    """LOSS-01: Token losses [2, 2, 2, 2] and [8]: 16 / 5 = 3.2, where a mean of means gives 5."""
    loss = TokenLoss()
    loss.valid_tokens = 5
    full = loss(logits_with_losses([2.0, 2.0, 2.0, 2.0]), torch.tensor([[0, 0, 0, 0]]))
    short = loss(logits_with_losses([8.0, 1.0, 1.0, 1.0]), torch.tensor([[0, -100, -100, -100]]))
    torch.testing.assert_close(full + short, torch.tensor(3.2), rtol=1e-6, atol=0)


def test_padding_gives_zero_loss_and_zero_gradient() -> None:  # NU-08
    loss = TokenLoss()
    loss.valid_tokens = 0
    logits = torch.randn(2, 3, 7, requires_grad=True)
    value = loss(logits, torch.full((2, 3), -100))
    value.backward()
    assert value.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()
