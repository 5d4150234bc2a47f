"""Which parameters are updated in one call, and with which weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic_train.parallel.stages import EMBEDDING

BLOCKS = "model.layers."
"""What the names of all parameters of blocks begin with."""


def decays(name: str, dimensions: int) -> bool:
    """Weight decay applies to matrices except the embedding (and so not to a head tied to it)."""
    return dimensions > 1 and name != EMBEDDING


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of one block (or those outside of blocks) that share their weight decay."""

    names: list[str]
    weight_decay: float

    def pick(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [tensors[name] for name in self.names]

    def gradients(self, gradients: dict[str, Tensor], scale: float) -> list[Tensor]:
        """``scale`` times the gradients in float32, as the master weights are.

        Cast and clipped here, block by block, so that a rank never holds another copy of all of them.
        """
        local = [gradients[name].float() for name in self.names]
        return local if scale == 1.0 else list(torch._foreach_mul(local, scale))


def group(parameters: dict[str, Tensor], names: Iterable[str], weight_decay: float) -> list[Group]:
    """``names`` by block and decay, in their order; without those of which this rank holds nothing."""
    groups: dict[tuple[str, float], list[str]] = {}
    for name in names:
        if parameters[name].numel():
            decay = weight_decay if decays(name, parameters[name].dim()) else 0.0
            groups.setdefault((_block(name), decay), []).append(name)
    return [Group(members, decay) for (_, decay), members in groups.items()]


def _block(name: str) -> str:
    return name.removeprefix(BLOCKS).partition(".")[0] if name.startswith(BLOCKS) else ""
