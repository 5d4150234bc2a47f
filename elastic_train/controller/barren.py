"""Generations in a row that end without a finished step: ever longer pauses, who stands aside, and when it is enough.

Some troubles lead to the same again: two hosts that reach the coordinator and not each other, a trainer that hangs
whenever it joins its group. Each takes a generation, and none is an error that counts for ``failure.max_errors``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.setbacks import Pause
from elastic_train.controller.trouble import Trouble

logger = logging.getLogger(__name__)

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
"""As storage that does not answer: what is away for minutes is tried often enough, and no log is filled."""
AT_ONCE = 1
"""So many barren generations are replaced without a pause: a second fault during a recovery is no pattern."""
ASIDE_SECONDS = 60.0
"""A suspect is tried again after this; each further time after twice as long."""
_REPEAT = ("peer", "hang", "copy_failed", "trainer_exited")
"""May come to the same for ever. Errors of trainers have a count of their own; lost hosts, full nodes, damaged
checkpoints and storage that does not answer change what the next generation is, or wait already."""


class Barren:
    """Of one job.

    Args:
        most: ``failure.max_barren_generations``.
        record: writes an event to the ledger.
        can_do_without: whether there is a layout for the job without these hosts.
    """

    def __init__(
        self, most: int, record: Callable[..., None], can_do_without: Callable[[list[HostRecord]], bool]
    ) -> None:
        self._most, self._record, self._can_do_without = most, record, can_do_without
        self._asides: dict[int, Pause] = {}
        """by number of the host"""
        self._finished_step: int | None = None
        """the newest when the last generation ended"""
        self._forgive()

    def _forgive(self) -> None:
        self._count = 0
        self._pause = Pause(FIRST_SECONDS, LONGEST_SECONDS)
        self._causes: Counter[str] = Counter()
        self._named: Counter[HostRecord] = Counter()

    def ended(self, generation: Generation, finished_step: int, cause: Trouble) -> float:
        """``generation`` has ended when ``finished_step`` was the newest; returns the seconds until the next one."""
        if finished_step != self._finished_step:
            self._forgive()
        self._finished_step = finished_step
        if finished_step > generation.start_step or cause.kind not in _REPEAT:
            return 0.0
        self._count += 1
        self._causes[cause.kind] += 1
        self._named.update(cause.hosts)
        if self._count <= AT_ONCE or self.reason_to_end(cause) is not None:
            return 0.0
        seconds, aside = self._pause.next(), self._set_aside(generation)
        self._tell(generation, cause, seconds, aside)
        return seconds

    def reason_to_end(self, cause: Trouble) -> str | None:
        """A sentence once there have been too many, the last one ended by ``cause``."""
        if self._count < self._most:
            return None
        named = ", ".join(f"{host.label} {times} times" for host, times in self._named.most_common(3))
        return (
            f"{cause.detail} ({self._count} generations in a row ended without a finished step, as many as "
            f"failure.max_barren_generations allows: {_listed(self._causes)}; named: {named or 'no host'})"
        )

    def describe(self, cause: Trouble, seconds: float) -> str:
        """What people are told while the job pauses."""
        return (
            f"{self._count} generations in a row ended without a finished step, the last one by {cause.kind}: "
            f"{cause.detail}; trying again in {seconds:.0f} s; a finished step ends the count, "
            f"{self._most} (failure.max_barren_generations) the job"
        )

    def _set_aside(self, generation: Generation) -> HostRecord | None:
        """Let the member that was named most often stand aside for a while, if the job can do without it."""
        suspects = [host for host, _ in self._named.most_common() if generation.has(host) and not host.suspected]
        if not suspects or not self._can_do_without([suspects[0]]):
            return None
        pause = self._asides.setdefault(suspects[0].number, Pause(ASIDE_SECONDS))
        suspects[0].suspected_until = time.time() + pause.next()
        return suspects[0]

    def _tell(self, generation: Generation, cause: Trouble, seconds: float, aside: HostRecord | None) -> None:
        logger.warning("%s", self.describe(cause, seconds))
        self._record(
            "barren_generation",
            generation=generation.number,
            count=self._count,
            most=self._most,
            cause=cause.kind,
            detail=cause.detail,
            retry_seconds=seconds,
            set_aside=aside.number if aside is not None else None,
        )


def _listed(causes: Counter[str]) -> str:
    return ", ".join(f"{kind} {times} times" for kind, times in causes.most_common())
