"""Whether a step is bad: its loss or gradient norm is not finite, or far above what the steps before it had.

Both are global values, so every rank comes to the same verdict, before anything is updated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class History:
    """Loss and gradient norm of the last good steps, oldest first."""

    losses: Sequence[float] = ()
    norms: Sequence[float] = ()


class StepJudge:
    """Judges steps in order.

    Args:
        window: so many good steps are compared with; while there are fewer, only what is not finite is bad.
        loss_factor, norm_factor: a value above so many medians is a spike; None: there are no spikes.
        history: of the steps before the first one that is judged.
    """

    def __init__(
        self, window: int, loss_factor: float | None, norm_factor: float | None, history: History = History()
    ) -> None:
        self._losses = deque(history.losses, maxlen=window)
        self._norms = deque(history.norms, maxlen=window)
        self._factors = loss_factor, norm_factor

    def judge(self, loss: float, norm: float) -> str | None:
        """None for a good step, which is remembered; else what is bad about it."""
        values = (("loss", loss), ("grad_norm", norm))
        broken = [f"{name} is {value}" for name, value in values if not math.isfinite(value)]
        spikes = [] if broken else self._spikes(loss, norm)
        if broken or spikes:
            return ", ".join(broken or spikes)
        self._losses.append(loss)
        self._norms.append(norm)
        return None

    def _spikes(self, loss: float, norm: float) -> list[str]:
        found = []
        for name, value, past, factor in zip(
            ("loss", "grad_norm"), (loss, norm), (self._losses, self._norms), self._factors, strict=True
        ):
            if factor is not None and len(past) == past.maxlen and value > factor * median(past):
                found.append(f"{name} {value:.6g} is above {factor:g} x {median(past):.6g}, the median of {len(past)}")
        return found
