"""Local gradients, their global norm, and clipping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

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


@torch.no_grad()
def clip(gradients: dict[str, Tensor], norm: float, limit: float | None) -> None:
    """Scale the gradients in place so that their global norm, now ``norm``, is at most ``limit``."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(list(gradients.values()), limit / norm)


def float32_groups(gradients: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The gradients as float32, for the optimizer, in groups: together they are all of them, in the given order.

    Float32 gradients are one group, and the same tensors. Others are copied block by block, so that no more than a
    block's copy lives at a time.
    """
    if all(gradient.dtype == torch.float32 for gradient in gradients.values()):
        yield gradients
        return
    for _, names in groupby(gradients, _block):
        yield {name: gradients[name].float() for name in names}


def _block(name: str) -> str:
    """The block that a parameter belongs to, ``model.layers.7``; of the others the name itself."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1:2] == ["layers"] else name
