"""When a step is finished, and what follows: its line, a save, the next generation, or the job's end."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.generation import Generation
from elastic_train.controller.growth import Growth
from elastic_train.controller.inventory import SnapshotSet
from elastic_train.controller.preemption import Preemption
from elastic_train.controller.saving import Saving
from elastic_train.controller.setbacks import Setbacks
from elastic_train.controller.stragglers import Stragglers
from elastic_train.controller.trouble import Trouble


class FinishedSteps:
    """Decides which step of the running generation is finished, and whether the generation goes on after it.

    Args:
        form: forms the next generation, for a reason.
        finish: ends the job.
    """

    def __init__(
        self,
        run: CurrentRun,
        saving: Saving,
        growth: Growth,
        preemption: Preemption,
        stragglers: Stragglers,
        bad_steps: BadSteps,
        setbacks: Setbacks,
        form: Callable[[Trouble], None],
        finish: Callable[[State, str], None],
    ) -> None:
        self._run, self._saving, self._growth, self._preemption = run, saving, growth, preemption
        self._stragglers, self._bad_steps, self._setbacks = stragglers, bad_steps, setbacks
        self._form, self._finish = form, finish

    def hold(self, number: int, rank: int, step: int, node: str, image: str) -> None:
        """``node`` has the whole image of a rank of generation ``number`` after ``step``."""
        if self._run.inventory.add(number, rank, step, node, image) is not None:
            self.finish_if_whole(number, step)

    def finish_if_whole(self, number: int, step: int) -> None:
        """Finish ``step`` of generation ``number`` if it is the next one, and nothing of it is missing any more."""
        run = self._run
        if run.state.ending:
            return  # the last checkpoint is being written; a step that is logged now would not be in it
        generation, snapshots = run.generation, run.inventory.find(number, step)
        if generation is None or number != generation.number or step != run.log.finished_step + 1:
            return
        if snapshots is not None and generation.holds(snapshots):
            self._finish_step(generation, snapshots)

    def do_without(self, node: str) -> None:
        """No host is left on ``node``: where no member was, no copy that is still on its way there comes to be."""
        run = self._run
        if (generation := run.generation) is None or generation.is_on(node):
            return
        for step, said in generation.stepped.items():
            snapshots = run.inventory.find(generation.number, step)
            for rank in said:
                if snapshots is None or node not in snapshots.holders.get(rank, ()):
                    generation.is_refused(step, rank, node)
        self.finish_if_whole(generation.number, run.log.finished_step + 1)

    def _finish_step(self, generation: Generation, snapshots: SnapshotSet) -> None:
        """A step is whole on every rank and every partner: it can no longer be lost to a single failure."""
        run, step = self._run, snapshots.step
        said = generation.stepped[step]
        run.time.step_finished(step, {generation.members[rank].number: told for rank, told in said.items()})
        straggler = self._stragglers.look(generation, step)
        run.log.append(generation, step)
        run.inventory.supersede(snapshots)
        self._setbacks.step_finished()
        if generation.first_step_at is None:
            self.first_step(generation)
        if (reason := self._bad_steps.step_finished(run.log.last_line)) is not None:
            self._finish(State.FAILED, reason)
            return
        if run.is_done:
            self._finish(State.FINISHED, f"all {step} steps are done")
            return
        self._saving.step_finished(generation, snapshots, run.log.last_line)
        self._growth.step_finished(run.log.last_line["seconds"])
        self._go_on(generation, straggler)

    def _go_on(self, generation: Generation, straggler: Trouble | None) -> None:
        """With the next step, or with other members where that costs no step."""
        due = self._preemption.cause(generation)
        if due is None:
            due = Trouble("growth", self._growth.due) if self._growth.due is not None else straggler
        if due is not None and not generation.troubles:
            self._run.account()
            self._form(due)
            return
        for member in generation.members:
            member.connection.send(self._run.progress("finished", generation.number))

    def first_step(self, generation: Generation) -> None:
        """``generation`` has come to its first step: it runs, and what was before it is over."""
        run = self._run
        generation.first_step_at = time.time()
        seconds = generation.formation.seconds(generation.first_step_at)
        self._growth.running(generation.cause.kind, seconds["recovery_seconds"] - seconds["detection_seconds"])
        self._saving.new_layout()
        run.state = State.RUNNING
        run.members.tell({"type": "discard", "before_generation": generation.number})
        run.record(
            "generation_formed",
            generation=generation.number,
            layout=str(generation.layout),
            reason=generation.reason,
            hosts=len(generation.members),
            spares=sum(not generation.has(host) for host in run.members.usable()),
            step=generation.start_step,
            cause=generation.cause.kind,
            detail=generation.cause.detail,
            **seconds,
            phases=generation.formation.phases,
            restored_bytes=generation.restored,
        )
        run.account()
