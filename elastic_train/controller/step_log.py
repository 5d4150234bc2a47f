"""The log of finished steps, ``steps.jsonl``: how far the job is, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_train.controller.generation import Generation, step_line
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.step_history import StepHistory
from elastic_train.storage.errors import StorageError


class StepLog:
    """Of one run.

    Args:
        on_event: called with ``{"event": "step", ...}`` for each line.
        record: writes an event to the ledger.
    """

    def __init__(
        self, folder: JobFolder, on_event: Callable[[dict[str, Any]], None], record: Callable[..., None]
    ) -> None:
        self._folder, self._on_event, self._record = folder, on_event, record
        self.samples: Callable[[int], list[int]] | None = None
        """ids of the samples of a step, if lines are to have them"""
        self.finished_step = 0
        self.last_line: dict[str, Any] = {}
        """of ``finished_step``; {} when it has none, or is not known"""
        self.history = StepHistory()

    def open(self, step: int) -> int:
        """The job goes on from ``step``; returns how many lines of steps after it there were."""
        self.finished_step = step
        dropped, self.last_line = self._folder.roll_back(step)
        self._folder.steps.flush()
        for line in self._folder.finished_steps():
            self.history.append(line)
        return dropped

    def go_on(self) -> None:
        """This run has logged steps before, and may have done more of them: nothing is rolled back yet."""
        for line in self._folder.finished_steps():
            self.history.append(line)
            self.finished_step, self.last_line = line["step"], line

    @property
    def stored_step(self) -> int:
        """The newest step whose line is in storage, and all before it."""
        return max(self.finished_step - self._folder.steps.unsaved, 0)

    def append(self, generation: Generation, step: int) -> dict[str, Any]:
        """The next step is finished: whole on every rank and every partner. Returns its line."""
        line = step_line(generation, step, self.samples(step) if self.samples else None)
        self._folder.steps.append(line)
        self.finished_step, self.last_line = step, line
        self.history.append(line)
        if "skipped" in line:
            self._record("bad_step", step=step, action="skip", detail=line["detail"])
        generation.is_finished(step)
        self._on_event({"event": "step", **line})
        return line

    def catch_up(self, generation: Generation | None, step: int) -> list[dict[str, Any]]:
        """Log the steps up to ``step`` that are whole everywhere, only their last message had not arrived.

        Returns their lines.
        """
        if generation is None:
            return []
        return [self.append(generation, extra) for extra in range(self.finished_step + 1, step + 1)]

    def roll_back(self, step: int) -> bool:
        """Make the log agree with the step that is restored; returns whether that is an earlier one."""
        if step >= self.finished_step:
            return False
        self._record("rolled_back", from_step=self.finished_step, to_step=step)
        self.last_line = {}
        try:
            self.last_line = self._folder.roll_back(step).line
        except StorageError as error:  # the log then has these steps twice; the job's state is as it should be
            self._record("log_not_rolled_back", detail=str(error))
        self.finished_step = step
        self.history.drop_after(step)
        return True
