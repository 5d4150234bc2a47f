"""Lion (arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum; one state tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.training.optimizers.groups import group


class LocalLion:
    """``weight -= lr x (sign(beta1 m + (1 - beta1) g) + weight_decay x weight)``, ``m = beta2 m + (1 - beta2) g``."""

    def __init__(self, parameters: dict[str, Tensor], config: OptimizerConfig) -> None:
        self._betas = config.betas
        self._parameters = parameters
        self._groups = group(parameters, parameters, config.weight_decay)
        self._exp_avg = {name: torch.zeros_like(local) for name, local in parameters.items()}
        self.state = {"exp_avg": self._exp_avg}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float, scale: float = 1.0) -> None:
        beta1, beta2 = self._betas
        for members in self._groups:
            weights, local = members.pick(self._parameters), members.gradients(gradients, scale)
            moments = members.pick(self._exp_avg)
            updates = torch._foreach_lerp(moments, local, 1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1.0 - lr * members.weight_decay)
            torch._foreach_add_(weights, updates, alpha=-lr)
            torch._foreach_lerp_(moments, local, 1.0 - beta2)
