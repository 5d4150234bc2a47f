"""When a step's snapshots may be written over the last but one: once the step between them is whole everywhere.

Normally the coordinator says so. While it is away each host says it of its own rank, and the ranks find out together
that all of them have heard it: a barrier among the trainers, once per step and beside the computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from elastic_train.controller.control_block import ControlBlock

_POLL_SECONDS = 0.0005


class Agreement:
    """Of one trainer.

    A rank comes to the barrier of a step when it has heard that the step is finished, or, from a host without a
    coordinator, that its own image of it is whole wherever it should be. When all have come either somebody has heard
    the first or everybody the second, which is the same thing. So no rank need know what the others have heard, and
    each takes part exactly once per step.

    Args:
        control: where the host says what it has heard.
        barrier: returns when all ranks have called it.
    """

    def __init__(self, control: ControlBlock, barrier: Callable[[], object]) -> None:
        self._control, self._barrier = control, barrier

    def wait(self, step: int) -> None:
        """Return when ``step`` is whole on all ranks and their partners.

        Raises:
            RuntimeError: another rank has ended.
        """
        while max(self._control.finished_step, self._control.held_step) < step:
            time.sleep(_POLL_SECONDS)
        self._barrier()


def barrier_of_all_ranks() -> Callable[[], object]:
    """In a group of its own, as a thread beside the computation's collectives uses it. All ranks must call this."""
    group = dist.new_group(backend="gloo")
    return lambda: dist.barrier(group)
