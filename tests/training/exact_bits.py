"""What must be the same, bit for bit, on every layout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from elastic_train.training.engine import StepMetrics
from tests.training.runs import Array


@dataclass(frozen=True)
class Bits:
    """Floats as ``repr`` writes them, which says every bit; ``state``: SHA-256 of every weight and moment."""

    losses: list[str]
    norms: list[str]
    evaluations: list[str]
    state: dict[str, str]


def bits(metrics: list[StepMetrics], state: dict[str, Array]) -> Bits:
    return Bits(
        [repr(step.loss) for step in metrics],
        [repr(step.grad_norm) for step in metrics],
        [repr(step.evaluation()) for step in metrics],
        digests(state),
    )


def digests(state: dict[str, Array]) -> dict[str, str]:
    return {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in state.items()}
