"""What becomes of a generation that cannot go on: why that is, and whether the job goes back, waits or ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.controller.barren import Barren
from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.ending import Ending
from elastic_train.controller.forming import Forming
from elastic_train.controller.generation import Generation
from elastic_train.controller.saving import Saving
from elastic_train.controller.setbacks import Setbacks
from elastic_train.controller.trouble import Trouble
from elastic_train.storage.errors import StorageError

_SETTLE_SECONDS = 0.03
"""The hosts of a node die together, and an echo may arrive before its cause: wait this long for the rest."""
_GRACE_SECONDS = 1.0
"""After we stood still all leases may be over: so long the hosts have to come back, with what they have in memory."""
_ALONE = ("trainer_killed", "trainer_crashed", "out_of_memory", "hang")
"""What is told once, not by several ranks or hosts."""


class Troubles:
    """Decides what follows from the troubles of a generation.

    Args:
        spawn: runs a coroutine beside everything else.
        fail: called with an error of our own.
    """

    def __init__(
        self,
        run: CurrentRun,
        setbacks: Setbacks,
        barren: Barren,
        saving: Saving,
        forming: Forming,
        ending: Ending,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._run, self._setbacks, self._barren, self._saving = run, setbacks, barren, saving
        self._forming, self._ending, self._spawn, self._fail = forming, ending, spawn, fail
        self._planned: Generation | None = None
        """the one that is being replaced"""
        self._grace_until = 0.0

    def add(self, generation: Generation, trouble: Trouble) -> None:
        """``generation`` cannot go on. Its other troubles are waited for a moment."""
        run = self._run
        if generation is not run.computing or generation.refusing:
            return
        generation.troubles.append(trouble)
        run.time.failed(trouble.began, trouble.seen)
        if self._planned is not generation:
            self._planned = generation
            self._plan(generation, 0.0 if trouble.kind in _ALONE else _SETTLE_SECONDS)

    def stood_still(self) -> None:
        """The coordinator itself did nothing for a while: what seems to be late is our own doing."""
        self._grace_until = time.monotonic() + _GRACE_SECONDS
        if self._run.generation is not None:
            self._run.generation.last_progress = time.time()

    def ends_job(self, cause: Trouble) -> bool:
        """Whether ``cause`` must not come again, or has too often; the job then ends."""
        reason = self._setbacks.reason_to_end(cause)
        if reason is None:
            return False
        self._run.traceback = cause.traceback
        self._ending.finish(State.FAILED, reason)
        return True

    def _plan(self, generation: Generation, delay: float) -> None:
        asyncio.get_running_loop().call_later(delay, self._replace_or_fail, generation)

    def _replace_or_fail(self, generation: Generation) -> None:
        try:
            self._replace(generation)
        except Exception as error:
            self._fail(error)

    def _replace(self, generation: Generation) -> None:
        run = self._run
        if generation is not run.computing:
            return  # the job ends, or another one has been formed
        if time.monotonic() < self._grace_until and not run.members.all_there(generation.members):
            self._plan(generation, _SETTLE_SECONDS)
            return
        cause = _cause(generation.troubles)
        run.record("trouble", generation=generation.number, cause=cause.kind, detail=cause.detail)
        run.account()
        self._saving.schedule.trouble()
        if self.ends_job(cause):
            return
        if cause.kind == "damaged":
            generation.refusing = True
            self._spawn(self._refuse_checkpoint(cause))
        elif cause.kind == "storage":
            self._wait_for_storage(cause, cause.detail)
        else:
            self._form_anew(generation, cause)

    def _form_anew(self, generation: Generation, cause: Trouble) -> None:
        """At once, unless that has come to nothing several times in a row."""
        run, barren = self._run, self._barren
        if run.log.finished_step <= generation.start_step:
            self._forming.catch_up()  # a step of which only the last news is missing counts
        seconds = barren.ended(generation, run.log.finished_step, cause)
        if (reason := barren.reason_to_end(cause)) is not None:
            self._ending.finish(State.FAILED, reason)
        elif seconds > 0:
            self._forming.pause(cause, barren.describe(cause, seconds), seconds, cause.kind)
        else:
            self._forming.form(cause)

    def _wait_for_storage(self, cause: Trouble, detail: str) -> None:
        self._forming.wait_for_storage(cause, detail, self._setbacks.storage_pause())

    async def _refuse_checkpoint(self, cause: Trouble) -> None:
        """A rank found the checkpoint damaged while it loaded: everybody goes back to the one before."""
        try:
            await self._saving.fall_back(cause.detail)
        except Fenced as error:
            self._ending.superseded(error)
        except (StorageError, CheckpointError) as error:
            self._wait_for_storage(cause, str(error))  # then the checkpoint is tried, and found damaged, again
        else:
            self._forming.form(cause)


def _cause(troubles: Sequence[Trouble]) -> Trouble:
    """The first that is no echo of another, with the earliest moments of all."""
    cause = next((trouble for trouble in troubles if not trouble.is_echo), troubles[0])
    cause.happened = min(trouble.began for trouble in troubles)
    cause.seen = min(trouble.seen for trouble in troubles)
    return cause
