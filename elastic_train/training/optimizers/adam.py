"""AdamW (arXiv:1711.05101) and Adam (arXiv:1412.6980), as ``torch.optim`` computes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam

from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.training.optimizers.groups import group


class LocalAdam:
    """Moments start as zeros and exist from step 0 on; the step number comes from outside (bias correction).

    ``decoupled``: AdamW takes ``lr x weight_decay x weight`` off the weight; Adam adds ``weight_decay x weight`` to the
    gradient (L2).
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        config: OptimizerConfig,
        *,
        decoupled: bool,
        fused: bool = True,
        names: Iterable[str] | None = None,
    ) -> None:
        """``names``: the parameters to update; None: all.

        ``fused``: one pass over memory; on CPUs the second moments then depend on how a tensor is sharded, as its last
        elements, which do not fill a vector, are rounded once more. Otherwise each element is on its own.
        """
        names = list(parameters) if names is None else list(names)
        self._config, self._decoupled, self._fused = config, decoupled, fused
        self._parameters = parameters
        self._groups = group(parameters, names, config.weight_decay)
        self._exp_avg = {name: torch.zeros_like(parameters[name]) for name in names}
        self._exp_avg_sq = {name: torch.zeros_like(parameters[name]) for name in names}
        self.state = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float, scale: float = 1.0) -> None:
        beta1, beta2 = self._config.betas
        for members in self._groups:
            local = members.gradients(gradients, scale)
            adam(
                members.pick(self._parameters),
                local,
                members.pick(self._exp_avg),
                members.pick(self._exp_avg_sq),
                [],
                # One element per tensor: torch increments each of them.
                list(torch.full((len(local),), step - 1.0, device=local[0].device).unbind()),
                fused=self._fused,
                foreach=not self._fused,
                decoupled_weight_decay=self._decoupled,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=members.weight_decay,
                eps=self._config.eps,
                maximize=False,
            )
