"""Learning rate by step number alone: nothing to save, the same on any number of machines."""

from __future__ import annotations

import math

from elastic_train.config.job import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, *, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    """Rate of update ``step`` (1 .. steps): ``peak * t / warmup``, then a cosine from the peak to ``min_lr``.

    ``min_lr`` is reached at ``steps`` and kept.
    """
    peak = optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    decay_steps = max(1, steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    return schedule.min_lr + 0.5 * (peak - schedule.min_lr) * (1.0 + math.cos(math.pi * progress))
