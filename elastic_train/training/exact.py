"""``training.determinism: exact``: loss and gradient norm of a step, the same bits whatever the layout.

Both are sums over ranks, and so are made of integers as well (``parallel.exact`` has the gradients).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.parallel.exact import CHUNK
from elastic_train.parallel.mesh import ParallelMesh

_SQUARE_BITS = 46
"""Squares are counted in units of 2**-46 of the largest one allowed; CHUNK of them fit in 62 bits."""
_LIMBS = 4
"""A sum of squares crosses ranks as so many 32-bit digits."""


@torch.no_grad()
def reduce_exactly(
    losses: list[Tensor],
    slots: range,
    gradients: dict[str, Tensor],
    copies: dict[str, int],
    mesh: ParallelMesh,
    *,
    count: int,
    invalid: bool,
) -> tuple[float, float]:
    """Loss of the step and L2 norm of the gradient, in two collectives over all ranks.

    ``losses``, ``slots`` and ``count`` as in ``sum_by_slot``. ``copies``: how many ranks hold the same part of a
    gradient. ``invalid``: the gradients mean nothing; on any rank, it makes the norm NaN on all.
    """
    filled = [gradient for gradient in gradients.values() if gradient.numel()]
    extremes = [value for gradient in filled for value in torch.aminmax(gradient)]
    peak = torch.stack(extremes).abs().max().item() if extremes else 0.0
    peaks = torch.tensor([peak, float(invalid)], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    peak, anywhere_invalid = peaks.tolist()
    # Every rank holds an equal part of what its copies hold together, in units that leave no fraction.
    world = mesh.layout.world_size
    squares = sum(_squares(gradients[name], peak) * (2 * world // copies[name]) for name in gradients)
    digits = [squares >> 32 * place & 0xFFFFFFFF for place in range(_LIMBS)]
    parts = torch.cat((_by_slot(losses, slots, count, mesh), torch.tensor(digits, device=mesh.device)))
    dist.all_reduce(parts)
    loss_parts, digits = parts[:-_LIMBS].cpu().view(torch.float64).tolist(), parts[-_LIMBS:].tolist()
    total = sum(digit << 32 * place for place, digit in enumerate(digits))
    norm = math.nan if anywhere_invalid else math.sqrt(total / (2 * world)) / _scale(peak)
    return _sum(loss_parts), norm


def sum_by_slot(losses: list[Tensor], slots: range, count: int, mesh: ParallelMesh) -> float:
    """Sum of losses over all ranks, in one collective.

    ``losses``: of this rank's micro-batches, the first of which are those of ``slots`` out of all ``count``, the others
    padding; empty but on the last stage.
    """
    parts = _by_slot(losses, slots, count, mesh)
    dist.all_reduce(parts)
    return _sum(parts.cpu().view(torch.float64).tolist())


def _by_slot(losses: list[Tensor], slots: range, count: int, mesh: ParallelMesh) -> Tensor:
    """int64 [count x cp]: the bits of each loss as a double, in its own place; zero in those of other ranks."""
    layout, place = mesh.layout, mesh.place
    table = torch.zeros(count, layout.cp, dtype=torch.float64, device=mesh.device)
    if losses and place.tp == 0:
        table[slots.start : slots.stop, place.cp] = torch.stack(losses[: len(slots)]).double()
    return table.view(torch.int64).flatten()


def _sum(losses: list[float]) -> float:
    """Correctly rounded, and so independent of order; ``math.fsum`` refuses to add infinities of both signs."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan


def _scale(peak: float) -> float:
    """A power of two that makes squares of values up to ``peak`` smaller than 2**_SQUARE_BITS."""
    return 2.0 ** (_SQUARE_BITS // 2 - math.frexp(peak)[1])


def _squares(gradient: Tensor, peak: float) -> int:
    """Sum of ``floor((g * scale)**2)``: the squares are exact in double precision, the sum is one of integers."""
    sums = []
    for part in torch.split(gradient.reshape(-1), CHUNK):
        if part.numel():
            sums.append(part.double().mul_(_scale(peak)).square_().long().sum())
    return sum(torch.stack(sums).tolist()) if sums else 0
