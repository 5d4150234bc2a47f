"""Nodes that are taken away: the job goes on without their hosts, whose state is in safety before they may end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from elastic_train.checkpoint.errors import Fenced
from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.ending import Ending
from elastic_train.controller.evacuation import Evacuation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.preemption import LEFT, Preemption
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message

_AGAIN_SECONDS = 2.0
"""Between the failures of a save that hosts are kept for."""
_EVACUATION_SHARE = 0.25
"""of the time until a node is gone: so long the copies to hosts that stay have the machine for themselves"""
_MOST_EVACUATION_SECONDS = 10.0
_LOOK_SECONDS = 0.05


class Leaving:
    """Decides when the job leaves a node that is being taken away, and when the hosts there are told to end.

    Args:
        form: forms the next generation, for a reason.
        spawn: runs a coroutine beside everything else.
    """

    def __init__(
        self,
        run: CurrentRun,
        preemption: Preemption,
        ending: Ending,
        form: Callable[[Trouble], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run, self._preemption, self._ending = run, preemption, ending
        self._form, self._spawn = form, spawn
        self._evacuation = Evacuation(run)
        self._saving = False
        """the state is being saved before hosts leave that alone may have it"""

    def notice(self, node: str, deadline_seconds: float | None, reason: str) -> None:
        """``node`` ends in so many seconds; None: it is not known when."""
        hosts = self._run.members.by_node.get(node, ())
        if self._preemption.notice(node, deadline_seconds, reason, hosts) and self._run.state == State.WAITING:
            self.save_first()
        self.look()

    def look(self) -> None:
        """Give a step up that is not finished in time, and tell hosts to end of which nothing is needed any more."""
        generation = self._run.computing
        if generation is not None and not generation.refusing:
            cause = self._preemption.cause(generation) if self._preemption.presses(generation) else None
            if cause is not None and not generation.troubles:
                self._form(cause)
        if self._run.state == State.WAITING:
            self._evacuation.look()
        for host in self._preemption.to_tell(self._run.members.hosts.values(), self._is_needed):
            host.connection.send({"type": "stop", "reason": LEFT})

    def _is_needed(self, host: HostRecord) -> bool:
        """Whether a host that leaves computes, or may have on its node what is nowhere else yet."""
        run = self._run
        if run.state == State.WAITING and self._evacuation.is_done():
            return run.checkpointer.reads_from(host)
        if run.checkpointer.running is not None or run.state == State.FINISHING:
            return True
        if run.state == State.RETURNING:
            return True  # it is not known yet
        if run.generation is None:
            return self._saving
        return run.generation.has(host) or run.generation.first_step_at is None

    def save_first(self) -> None:
        """Nobody computes, and if hosts leave their state must be with others first, or in storage."""
        if not self._saving and any(host.leaving for host in self._run.members.hosts.values()):
            self._saving = True
            self._spawn(self._save())

    def copy_failed(self, message: Message) -> None:
        """A host could not send what others should keep, while nobody computes."""
        self._evacuation.failed(message)

    async def _save(self) -> None:
        try:
            await self._evacuate()
            while await self._ending.save_newest() is not None and self._run.state == State.WAITING:
                await asyncio.sleep(_AGAIN_SECONDS)
        except Fenced as error:
            self._ending.superseded(error)
        finally:
            self._saving = False
        self.look()

    async def _evacuate(self) -> None:
        """Let hosts that have joined take the newest step, if there are any, before storage is asked to."""
        patience = min(_EVACUATION_SHARE * self._preemption.seconds_left(), _MOST_EVACUATION_SECONDS)
        over = time.monotonic() + patience
        while self._run.state == State.WAITING and self._evacuation.look() and time.monotonic() < over:
            await asyncio.sleep(_LOOK_SECONDS)
