"""The global norm of local gradients, and clipping."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def squared_norm(gradients: dict[str, Tensor], copies: dict[str, int]) -> Tensor:
    """float64 scalar: this rank's share of the squared L2 norm; shares of all ranks add up to the global one.

    ``copies``: how many ranks hold the same part of a tensor; each of them counts that fraction of it.
    """
    names = [name for name, gradient in gradients.items() if gradient.numel()]
    if not names:
        return torch.zeros((), dtype=torch.float64)
    # Of bf16 gradients too, squares are summed and roots kept in float32.
    norms = torch.stack(torch._foreach_norm([gradients[name] for name in names], 2, dtype=torch.float32)).double()
    weights = torch.tensor([1.0 / copies[name] for name in names], dtype=torch.float64, device=norms.device)
    return (norms.square() * weights).sum()


def clipping(norm: float, limit: float | None) -> float:
    """The factor that brings gradients whose global norm is ``norm`` down to ``limit``; 1 where they are within it."""
    return limit / norm if limit is not None and norm > limit else 1.0
