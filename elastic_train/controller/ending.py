"""The end of a run: the last checkpoint, the last lines, and everybody may go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from elastic_train.checkpoint.errors import Fenced
from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.saving import Newest, Saving


class Ending:
    """Decides how the run ends: with the newest step in storage where that can be, else as failed.

    Args:
        spawn: runs a coroutine beside everything else.
    """

    def __init__(self, run: CurrentRun, saving: Saving, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._run, self._saving, self._spawn = run, saving, spawn
        self.ended = asyncio.Event()

    def finish(self, state: State, reason: str) -> None:
        """Compute no more, save the newest step, then end as ``state``."""
        run = self._run
        run.state = State.FINISHING
        run.time.finishing()
        run.decide(finishing=state.value, reason=reason)
        run.members.tell({"type": "release"})
        self._spawn(self._finish(state, reason))

    async def _finish(self, state: State, reason: str) -> None:
        try:
            failure = await self.save_newest()
        except Fenced as error:
            self._run.folder.abandon()
            state, reason = State.FAILED, _superseded(error)
        else:
            if failure is not None and state == State.FINISHED:
                state, reason = State.FAILED, f"the final checkpoint failed: {failure}"
            elif failure is not None:
                reason = f"{reason}; the last checkpoint failed: {failure}"
        self.end(state, reason)

    async def save_newest(self) -> Exception | None:
        """Save the newest step that is whole in memory, as nobody computes; returns why that could not be done.

        Raises Fenced when another submission has taken over.
        """
        return await self._saving.save_last(self._newest)

    def _newest(self) -> Newest:
        run = self._run
        if run.computing is not None:
            return None, None, {}  # somebody computes again, and saves what is due
        if run.generation is not None:
            run.inventory.give_up_after(run.generation.newest_told)  # what nobody told of could not be logged
        snapshots = run.inventory.newest_complete(run.members.nodes())
        layout = run.layouts.get(snapshots.generation) if snapshots else None
        if snapshots is not None:
            run.log.catch_up(run.generation, snapshots.step)
        return snapshots, layout, run.log.last_line

    def end(self, state: State, reason: str) -> None:
        """End at once, unless that has happened."""
        run = self._run
        if run.state.ended:
            return
        run.state, run.message = state, reason
        run.time.end()
        run.account()
        run.record("job_finished", status=state.value, reason=reason, step=run.log.finished_step)
        run.members.tell({"type": "stop", "reason": state.value})
        self.ended.set()

    def superseded(self, error: Fenced) -> None:
        """Another submission has taken over: what this one does counts no more."""
        if not self._run.state.ending:  # else the last commit finds out by itself
            self._run.folder.abandon()
            self.end(State.FAILED, _superseded(error))


def _superseded(error: Fenced) -> str:
    return f"another submission of this job has taken over: {error}"
