"""Muon (arXiv:2502.16982): the matrices of the blocks move by their orthogonalised momentum, all else by AdamW."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.parallel.shard import LocalShard
from elastic_train.parallel.whole_matrix import WholeMatrices
from elastic_train.training.optimizers.adam import LocalAdam
from elastic_train.training.optimizers.groups import BLOCKS, group

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, chosen for a steep start: singular values end between 0.7 and 1.2, not at 1 exactly."""
STEPS = 5
EPS = 1e-7


def is_matrix_of_block(name: str, dimensions: int) -> bool:
    """Whether Muon updates a parameter. Embedding, head, norms and biases are left to AdamW."""
    return dimensions == 2 and name.startswith(BLOCKS)


class LocalMuon:
    """One learning rate serves both: an orthogonal update of an A x B matrix is scaled by ``0.2 sqrt(max(A, B))``, so
    that its root mean square is AdamW's (0.2; torch calls this ``match_rms_adamw``). Momentum is Nesterov's, weight
    decay is decoupled, and Newton-Schulz runs in the precision of ``matrices``.
    """

    def __init__(
        self, shards: dict[str, LocalShard], config: OptimizerConfig, matrices: WholeMatrices, *, fused: bool = True
    ) -> None:
        """``matrices`` covers the names of ``is_matrix_of_block``."""
        self._parameters = {name: shard.tensor for name, shard in shards.items()}
        self._shapes = {name: shard.global_shape for name, shard in shards.items()}
        self._momentum, self._matrices = config.momentum, matrices
        whole = [name for name, shape in self._shapes.items() if is_matrix_of_block(name, len(shape))]
        rest = [name for name in shards if name not in set(whole)]
        self._groups = group(self._parameters, whole, config.weight_decay)
        self._rest = LocalAdam(self._parameters, config, decoupled=True, fused=fused, names=rest)
        self._buffers = {name: torch.zeros_like(self._parameters[name]) for name in whole}
        self.state = {"momentum_buffer": self._buffers, **self._rest.state}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], *, step: int, lr: float, scale: float = 1.0) -> None:
        self._rest.step(gradients, step=step, lr=lr, scale=scale)
        for members in self._groups:
            local, buffers = members.gradients(gradients, scale), members.pick(self._buffers)
            torch._foreach_lerp_(buffers, local, 1.0 - self._momentum)
            torch._foreach_mul_(members.pick(self._parameters), 1.0 - lr * members.weight_decay)
        for name, update in self._matrices.map(
            lambda name: self._direction(name, gradients[name], scale), orthogonalise
        ):
            size = 0.2 * math.sqrt(max(self._shapes[name]))
            self._parameters[name].add_(update, alpha=-lr * size)

    def _direction(self, name: str, gradient: Tensor, scale: float) -> Tensor:
        """Nesterov's look ahead: the gradient and the momentum, which has taken it in already."""
        return (gradient.float() * scale).lerp(self._buffers[name], self._momentum)


def orthogonalise(matrix_AB: Tensor) -> Tensor:
    """About ``U V^T`` of the matrix' singular value decomposition, in its dtype.

    Newton-Schulz as in torch.optim.Muon and https://kellerjordan.github.io/posts/muon/; a matrix of zeros stays zero.
    """
    a, b, c = COEFFICIENTS
    wide = matrix_AB.shape[0] <= matrix_AB.shape[1]
    x = matrix_AB if wide else matrix_AB.T
    x = x / x.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T
