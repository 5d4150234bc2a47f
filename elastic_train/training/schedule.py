"""Learning rate by step number alone: nothing to save, the same on any number of machines."""

from __future__ import annotations

import math

from elastic_train.config.optimizer import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, *, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    """Rate of update ``step`` (1 .. steps): ``peak * t / warmup``, then the peak times what the schedule leaves of it.

    ``min_lr`` is reached at ``steps`` and kept; ``constant`` stays at the peak.
    """
    peak = optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    start = steps - _decay_steps(schedule, steps) if schedule.name == "wsd" else schedule.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1.0 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * left


def _decay_steps(schedule: ScheduleConfig, steps: int) -> int:
    """Length of the last phase of ``wsd`` (arXiv:2404.06395), which the warm-up may leave less room for."""
    wanted = steps // 10 if schedule.decay_steps is None else schedule.decay_steps
    return max(0, min(wanted, steps - schedule.warmup_steps))
