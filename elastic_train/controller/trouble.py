"""Why a generation ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elastic_train.controller.host_record import HostRecord


@dataclass(slots=True)
class Trouble:
    """Why a generation ended, as first seen."""

    kind: str
    """host_lost, host_silent, preemption, trainer_killed, trainer_crashed, trainer_exited, out_of_memory, straggler,
    hang, copy_failed, growth, start, or what ``trainer._error_kind`` calls it"""
    detail: str
    seen: float = field(default_factory=time.time)
    traceback: str | None = None
    happened: float | None = None
    """when it failed, where that was long before it was seen: the last sign of life"""
    ends: bool = False
    """the job must not go on after it"""
    hosts: tuple[HostRecord, ...] = ()
    """whom it names"""

    # An echo (a peer's connection error, the failed copy to a dead partner) must not hide the cause that arrives later.
    _ECHOES = ("peer", "copy_failed", "trainer_exited")

    @property
    def began(self) -> float:
        return self.seen if self.happened is None else self.happened

    @property
    def is_echo(self) -> bool:
        return self.kind in self._ECHOES
