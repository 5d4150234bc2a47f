"""What becomes of bad steps, by ``failure.bad_step``, and when there are too many of them."""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.config.operation import FailureConfig
from elastic_train.controller.step_history import StepHistory
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message


class BadSteps:
    """Of one run.

    Args:
        history: of the finished steps.
        record: writes an event to the ledger.
    """

    def __init__(self, failure: FailureConfig, history: StepHistory, record: Callable[..., None]) -> None:
        self._failure, self._history, self._record = failure, history, record
        self._no_retry: set[int] = set()
        """unfinished steps that have been tried before, or follow one that was left out"""

    def refused(self, step: int, trouble: Trouble) -> None:
        """A trainer has stopped before the update of the bad ``step``: it is tried once more, or the job ends."""
        trouble.ends = self._failure.bad_step == "end"
        if step not in self._no_retry:  # every rank says it
            self._no_retry.add(step)
            action = "end" if trouble.ends else "roll_back"
            self._record("bad_step", step=step, action=action, detail=trouble.detail)

    def resumed(self, line: Message) -> None:
        """The run goes on after the step of ``line``; {}: after none."""
        if "skipped" in line:
            self._no_retry.add(line["step"] + 1)

    def step_finished(self, line: Message) -> str | None:
        """``line`` is of the newest step; a sentence when the job must end because too many were left out."""
        step, failure = line["step"], self._failure
        self._no_retry.discard(step)
        if "skipped" not in line:
            return None
        self._no_retry.add(step + 1)
        bad = self._history.bad_among(failure.bad_step_window)
        if bad <= failure.max_bad_steps:
            return None
        return (
            f"step {step}: {line['detail']}; {bad} of the last {failure.bad_step_window} steps were bad and left out, "
            f"more than failure.max_bad_steps={failure.max_bad_steps}"
        )

    def assignment(self) -> Message:
        """What trainers must know to judge as those before them did; values of steps only if they look for spikes."""
        failure = self._failure
        spikes = failure.loss_spike_factor is not None or failure.norm_spike_factor is not None
        history = self._history.good(failure.bad_step_window if spikes else 0)
        return {"history": history, "no_retry": sorted(self._no_retry)}
