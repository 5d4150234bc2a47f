"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` computes it (no dampening, not Nesterov)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.training.optimizers.groups import group


class LocalSGD:
    """``buffer = momentum x buffer + gradient``, ``weight -= lr x buffer``; weight decay is added to the gradient (L2).

    Without momentum there is no state.
    """

    def __init__(self, parameters: dict[str, Tensor], config: OptimizerConfig, *, fused: bool = True) -> None:
        self._momentum, self._fused = config.momentum, fused
        self._parameters = parameters
        self._groups = group(parameters, parameters, config.weight_decay)
        self.state: dict[str, dict[str, Tensor]] = {}
        if self._momentum:
            # A buffer of zeros becomes the first gradient in the first step: what torch starts with.
            self.state["momentum_buffer"] = {name: torch.zeros_like(local) for name, local in parameters.items()}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float, scale: float = 1.0) -> None:
        for members in self._groups:
            buffers: list[Tensor | None] = [None] * len(members.names)
            if self._momentum:
                buffers = [*members.pick(self.state["momentum_buffer"])]
            sgd(
                members.pick(self._parameters),
                members.gradients(gradients, scale),
                buffers,
                fused=self._fused,
                foreach=not self._fused,
                weight_decay=members.weight_decay,
                momentum=self._momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
