"""An exponential moving average of the weights (``training.ema_decay``)."""

from __future__ import annotations

import torch
from torch import Tensor

KIND = "ema"
"""The kind of state under which the average is saved."""


class AveragedWeights:
    """float32 average of each local part of the master weights: ``ema = decay x ema + (1 - decay) x weight``.

    Starts as the initial weights, so it needs no correction for its start. Costs 4 bytes per local element.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float) -> None:
        """``weights``: live local float32 tensors, may be empty, by name."""
        self._decay = decay
        self._weights = weights
        self.average = {name: torch.zeros_like(local) for name, local in weights.items()}
        self._filled = [name for name, local in weights.items() if local.numel()]

    def start(self) -> None:
        """Begin with the weights as they are."""
        for name in self._filled:
            self.average[name].copy_(self._weights[name])

    def update(self) -> None:
        """Take in the weights after an update."""
        if self._filled:
            torch._foreach_lerp_(self._pick(self.average), self._pick(self._weights), 1.0 - self._decay)

    def swap(self) -> None:
        """Exchange weights and average, bit for bit; called again, everything is as before. Needs one tensor more."""
        for name in self._filled:
            weight, average = self._weights[name], self.average[name]
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pick(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        return [tensors[name] for name in self._filled]
