"""AdamW over the local parts of parameters, gradients and moments.

It sees plain tensors: the update is elementwise, and dispatching it over DTensors costs a second in the first step.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from elastic_train.config.job import Job, OptimizerConfig


def decays(name: str, dimensions: int) -> bool:
    """Weight decay applies to matrices except the embedding (and so not to a head tied to it)."""
    return dimensions > 1 and not name.endswith("embed_tokens.weight")


class LocalOptimizer(Protocol):
    """Updates the local parts of master weights, in place."""

    state: dict[str, dict[str, Tensor]]
    """Kind of state -> parameter name -> live float32 tensor of the shape of the local part."""

    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float) -> None: ...


def build_optimizer(parameters: dict[str, Tensor], job: Job) -> LocalOptimizer:
    """The optimizer of the job over ``parameters``: live local float32 tensors, may be empty, by name."""
    return LocalAdamW(parameters, job.optimizer, fused=job.training.determinism == "default")


class LocalAdamW:
    """Moments start as zeros and exist from step 0 on; the step number comes from outside (bias correction)."""

    def __init__(self, parameters: dict[str, Tensor], config: OptimizerConfig, *, fused: bool = True) -> None:
        """``parameters``: live local tensors, may be empty, by name.

        ``fused``: one pass over memory; on CPUs the second moments then depend on how a tensor is sharded, as its last
        elements, which do not fill a vector, are rounded once more. Otherwise each element is on its own.
        """
        self._config = config
        self._fused = fused
        self._parameters = parameters
        self.exp_avg = {name: torch.zeros_like(local) for name, local in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(local) for name, local in parameters.items()}
        self.state = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        filled = [name for name, local in parameters.items() if local.numel()]
        self._groups = {
            config.weight_decay: [name for name in filled if decays(name, parameters[name].dim())],
            0.0: [name for name in filled if not decays(name, parameters[name].dim())],
        }
        if config.weight_decay == 0.0:
            self._groups = {0.0: filled}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float) -> None:
        """Update number ``step`` (1-based), in place. ``gradients``: local, float32, by name."""
        beta1, beta2 = self._config.betas
        for weight_decay, names in self._groups.items():
            if not names:
                continue
            adamw(
                [self._parameters[name] for name in names],
                [gradients[name] for name in names],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                # One element per tensor: torch increments each of them.
                list(torch.full((len(names),), step - 1.0, device=gradients[names[0]].device).unbind()),
                fused=self._fused,
                foreach=not self._fused,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=weight_decay,
                eps=self._config.eps,
                maximize=False,
            )
