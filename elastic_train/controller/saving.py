"""Tier 2 over the life of a job: when a step is saved, what the ledger says of it, and by whose right."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from elastic_train.checkpoint.errors import Fenced
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.checkpointer import Checkpointer, Save, UploadFailed, holder_name
from elastic_train.controller.generation import Generation
from elastic_train.controller.inventory import SnapshotSet
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.resumption import take_over
from elastic_train.controller.save_schedule import SaveSchedule

_CLAIM_SECONDS = 10.0
_LAST_SAVE_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts at the last checkpoint, each of which has storage's own budget of retries."""

Newest = tuple[SnapshotSet | None, Layout | None, Mapping[str, Any]]


class Saving:
    """Of one coordinator.

    Args:
        spawn: runs a coroutine beside everything else.
        record: writes an event to the ledger.
        superseded: called once it is known that another submission of the job has taken over.
    """

    def __init__(
        self,
        job: Job,
        folder: JobFolder,
        checkpointer: Checkpointer,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        record: Callable[..., None],
        superseded: Callable[[Fenced], None],
    ) -> None:
        self._folder, self._checkpointer = folder, checkpointer
        self._spawn, self._record, self._superseded = spawn, record, superseded
        self.schedule = SaveSchedule(job.checkpoint)

    def open(self) -> int:
        """Take the job over and choose the checkpoint to go on from; returns its step, 0 without one.

        Raises:
            StorageError, CheckpointError: the job folder cannot be read or written.
        """
        taken = take_over(self._folder.store, holder_name(), time.time())
        self._checkpointer.claim, self._checkpointer.committed = taken.claim, taken.checkpoint
        self._record_refused(taken.refused)
        step = taken.checkpoint.step if taken.checkpoint else 0
        self.schedule.start(step)
        return step

    async def fall_back(self, detail: str) -> None:
        """A rank found wrong bytes in the newest checkpoint: the job goes on from the one before.

        Raises:
            Fenced, StorageError, CheckpointError: it is still the newest.
        """
        damaged = self._checkpointer.committed
        assert damaged is not None
        self._record("checkpoint_refused", step=damaged.step, detail=detail)
        self._record_refused(await self._checkpointer.fall_back(damaged))

    def _record_refused(self, sentences: list[str]) -> None:
        for sentence in sentences:
            self._record("checkpoint_refused", detail=sentence)

    def new_layout(self) -> None:
        """A generation has finished its first step."""
        self.schedule.new_layout()

    def step_finished(self, generation: Generation, snapshots: SnapshotSet, line: Mapping[str, Any]) -> None:
        """Begin to save the step when it is due; ``line`` is that of ``steps.jsonl``."""
        seconds = line["seconds"] + line["snapshot_seconds"] + line["stall_seconds"]
        if (change := self.schedule.step(seconds, self._checkpointer.running is not None)) is not None:
            self._record("checkpoint_interval", **change)
        if not self.schedule.due(snapshots.step):
            return
        running = self._checkpointer.running
        if running is None:
            self.schedule.begun(snapshots.step)
            self._spawn(self._save(generation, snapshots, line))
        elif self.schedule.skipped(snapshots.step):
            self._record(
                "checkpoint_skipped", step=snapshots.step, running=running.step, seconds=running.seconds_so_far
            )

    async def _save(self, generation: Generation, snapshots: SnapshotSet, line: Mapping[str, Any]) -> None:
        metrics = _metrics(line, snapshots.step)
        try:
            save = await self._checkpointer.save(snapshots, generation.layout, generation.members, metrics)
        except Fenced as error:
            self._superseded(error)
        except Exception as error:
            self.schedule.failed(generation.finished_step)
            self._record("checkpoint_failed", step=snapshots.step, detail=f"{type(error).__name__}: {error}")
        else:
            self._record_save(save)

    async def save_last(self, newest: Callable[[], Newest]) -> Exception | None:
        """The job's last checkpoint: what nobody computes any more is only in memory.

        Tried again, from the copies that are left. Returns why it could not be saved.

        Args:
            newest: the newest step that is whole in memory, its layout and its line of ``steps.jsonl``.

        Raises:
            Fenced: another submission has taken over.
        """
        for pause in (*_LAST_SAVE_PAUSES, None):
            snapshots, layout, line = newest()
            try:
                await self._finish(snapshots, layout, line)
                return None
            except Fenced:
                raise
            except Exception as error:
                step = snapshots.step if snapshots else line.get("step", 0)
                self._record("checkpoint_failed", step=step, detail=f"{type(error).__name__}: {error}")
                failure = error
            if pause is not None:
                await asyncio.sleep(pause)
        return failure

    async def _finish(self, snapshots: SnapshotSet | None, layout: Layout | None, line: Mapping[str, Any]) -> None:
        """Of ``snapshots``, unless that step is committed already. ``line`` says which step it should be.

        Raises UploadFailed when a checkpoint of that step is not there afterwards.
        """
        metrics = _metrics(line, snapshots.step) if snapshots else {}
        if (save := await self._checkpointer.finish(snapshots, layout, metrics)) is not None:
            self._record_save(save)
        committed = self._checkpointer.committed.step if self._checkpointer.committed else 0
        if committed < line.get("step", 0):
            raise UploadFailed(f"no hosts have all of step {line['step']} any more; step {committed} is in storage")

    def _record_save(self, save: Save) -> None:
        self._record("checkpoint_committed", **save.report())
        self.schedule.committed(save.seconds)
        removed = save.tidied.removed
        if removed.steps or removed.objects or removed.unfinished:
            self._record("checkpoints_removed", **dataclasses.asdict(removed))
        if save.tidied.error:
            self._record("retention_failed", detail=save.tidied.error)

    def go_back(self, step: int) -> None:
        """The job goes on from the earlier ``step``."""
        self._checkpointer.go_back(step)
        self.schedule.go_back(step)

    def returned(self, step: int) -> None:
        """The job has come to ``step`` without a coordinator: what fell due meanwhile is saved at the next step."""
        committed = self._checkpointer.committed
        first = committed.step + 1 if committed else 1
        if any(self.schedule.due(missed) for missed in range(first, step + 1)):
            self.schedule.skipped(step)

    async def watch_claim(self) -> None:
        """A submission that has been superseded must not go on until its next commit, which may be hours away."""
        while True:
            await asyncio.sleep(_CLAIM_SECONDS)
            try:
                await self._checkpointer.check_claim()
            except Fenced as error:
                self._superseded(error)
                return


def _metrics(line: Mapping[str, Any], step: int) -> dict[str, float]:
    """What is known of exactly this step."""
    known = line if line.get("step") == step else {}
    names = ("loss", "eval_loss", "eval_loss_ema")
    return {name: known[name] for name in names if known.get(name) is not None}
