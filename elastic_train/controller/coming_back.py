"""The way back of a coordinator that has died: it hears what the hosts have done, and goes on from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.copies import Copies
from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.ending import Ending
from elastic_train.controller.finished_steps import FinishedSteps
from elastic_train.controller.generation import Generation
from elastic_train.controller.growth import Growth
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.returning import Decision, PastRun, Stories, Verdict, cause_of
from elastic_train.controller.saving import Saving
from elastic_train.controller.survey import Survey
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message


class ComingBack:
    """Decides, while the run is RETURNING, how it goes on: ``returning`` says what can be done, here it is done.

    Args:
        form: forms the next generation, for a reason.
        ends_job: ends the job for a reason that must not come again, or has too often; whether it did.
        handle: called with what hosts have told in the meantime, once it is known what it belongs to.
    """

    def __init__(
        self,
        run: CurrentRun,
        saving: Saving,
        growth: Growth,
        copies: Copies,
        bad_steps: BadSteps,
        finished_steps: FinishedSteps,
        ending: Ending,
        form: Callable[[Trouble], None],
        ends_job: Callable[[Trouble], bool],
        handle: Callable[[HostRecord, Message], None],
    ) -> None:
        self._run, self._saving, self._growth, self._copies = run, saving, growth, copies
        self._bad_steps, self._finished_steps, self._ending = bad_steps, finished_steps, ending
        self._form, self._ends_job, self._handle = form, ends_job, handle
        self._stories: Stories | None = None
        """what the hosts tell, from ``begin`` until it is known how the run goes on"""
        self._survey: Survey | None = None
        """once a generation must be formed from what is in memory"""

    def begin(self, past: PastRun) -> None:
        """This run has had a coordinator before: its hosts know what has been done since that died."""
        run = self._run
        run.log.go_on()
        if past.decisions and run.log.last_line.get("generation", 0) < past.decisions[-1].generation:
            run.log.roll_back(past.decisions[-1].step)  # that had not come to storage
        run.members.count_from(run.folder.last_host())
        run.time.resumed(run.log.finished_step, 0)
        run.time.returned(run.folder.last_account())
        past.replay(run.inventory)
        run.layouts = {decision.generation: decision.layout for decision in past.decisions}
        self._stories = Stories(past, run.job.failure.lease_seconds)
        run.state = State.RETURNING
        run.decide(returned=True)
        run.record("coordinator_returned", step=run.log.finished_step, generation=run.generation_count)

    # -- what hosts say ------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hosts can come from now on."""
        if self._stories is not None:
            self._stories.listen(time.monotonic())

    def join(self, host: HostRecord, message: Message) -> None:
        """A host has come back, or has come."""
        if self._stories is not None:
            self._stories.join(message)
        if self._survey is not None:
            self._survey.ask(host)

    def lose(self, host: HostRecord) -> None:
        """It is gone again."""
        if self._stories is not None:
            self._stories.lose(host)
        if self._survey is not None:
            self._survey.lose(host)

    def hear(self, host: HostRecord, message: Message) -> None:
        """A host tells its story, what images it has, or after its story something of its trainer."""
        if message["type"] not in ("surveyed", "pool"):
            if self._stories is not None:
                self._stories.tell(host, message)
        elif self._survey is not None:
            self._survey.tell(host, message)

    def end_with(self, state: State, reason: str) -> None:
        """Let the run end as soon as it is known what there is to save."""
        if self._stories is not None:
            self._stories.past.finishing = state, reason

    @property
    def will_end(self) -> bool:
        """The end of the run has been decided already."""
        return self._stories is not None and self._stories.past.finishing is not None

    # -- how the run goes on -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Go on as soon as it is known how."""
        stories, now = self._stories, time.monotonic()
        if stories is None or self._run.state != State.RETURNING:
            return
        if (newest := stories.decision) is not None and newest.generation not in self._run.layouts:
            self._learn(newest)
        if self._survey is not None:
            if self._survey.over(now):
                self._go_on_from_memory(stories, self._survey)
        elif (verdict := stories.verdict(now, self._run.log.finished_step)) is Verdict.ADOPT:
            self._adopt(stories)
        elif verdict is Verdict.BEGIN:
            self._start()
        elif verdict is Verdict.REPLACE:
            self._survey = Survey(now)
            for host in self._run.members.hosts.values():
                self._survey.ask(host)

    def _learn(self, decision: Decision) -> None:
        """Hosts take part in a generation whose line of the journal had not come to storage.

        Where it began tells what had been given up for it; the log may still have that, as the way back comes to
        storage no sooner. Who comes back after us shall not depend on the hosts for it again.
        """
        run = self._run
        run.inventory.give_up_after(decision.step)
        run.open_generation(decision.generation, decision.layout)
        run.decide(**decision.as_journaled())
        if run.log.last_line.get("generation", 0) < decision.generation:
            run.log.roll_back(decision.step)

    def _start(self) -> None:
        """The coordinator had died before there was a generation."""
        self._stories = None
        self._bad_steps.resumed(self._run.log.last_line)
        self._run.state = State.STARTING
        if self._run.is_done:
            self._ending.end(State.FINISHED, f"step {self._run.log.finished_step} was already reached")

    def _know(self, stories: Stories) -> Generation | None:
        """The generation that the hosts have told of, with the steps of it that are not logged yet."""
        self._stories = self._survey = None
        self._bad_steps.resumed(self._run.log.last_line)
        return stories.rebuilt(self._run.log.finished_step)

    def _adopt(self, stories: Stories) -> None:
        """All trainers step on: nothing but what they have done meanwhile has to be written down."""
        run = self._run
        generation = self._know(stories)
        assert generation is not None and stories.decision is not None
        run.generation = generation
        generation.partners = self._copies.choose(generation.members)
        self._growth.formed(stories.decision.choice)
        lines = self._catch_up(stories, generation)
        self._copies.tell(generation, range(len(generation.members)))
        run.members.tell(run.progress("adopted", generation.number))
        if lines and (reason := self._bad_steps.step_finished(lines[-1])) is not None:
            self._ending.finish(State.FAILED, reason)
        for step in sorted(generation.stepped):
            self._finished_steps.finish_if_whole(generation.number, step)
        for host, message in stories.later:
            self._handle(host, message)
        if run.is_done and run.state.computes:
            self._ending.finish(State.FINISHED, f"all {run.log.finished_step} steps are done")

    def _catch_up(self, stories: Stories, generation: Generation) -> list[dict[str, Any]]:
        """Log the steps that were done meanwhile, and go on accounting and saving after them; returns their lines."""
        run, number, before = self._run, generation.number, self._run.log.finished_step
        step = max(stories.finished_step, before)
        run.record(  # before the lines: whoever follows them knows then whose they are
            "generation_adopted",
            generation=number,
            layout=str(generation.layout),
            hosts=len(generation.members),
            cause=generation.cause.kind,
            start_step=generation.start_step,
            step=step,
            steps=step - before,
        )
        known = run.log.last_line.get("generation") == number
        stories.describe(number, run.inventory)
        lines = run.log.catch_up(generation, step)
        skipped_seconds = sum(line["seconds"] for line in lines if "skipped" in line)
        run.time.adopted((member.number for member in generation.members), run.log.finished_step, skipped_seconds)
        self._saving.returned(run.log.finished_step)
        run.state = State.FORMING
        if known:
            run.state, generation.first_step_at = State.RUNNING, generation.formed
        elif run.log.finished_step > generation.start_step:
            self._finished_steps.first_step(generation)
        return lines

    def _go_on_from_memory(self, stories: Stories, survey: Survey) -> None:
        """Form a generation from the images there are, or end as it had been decided."""
        run = self._run
        run.generation = self._know(stories)
        survey.fill(run.inventory)
        run.inventory.give_up_after(stories.first_unknown(run.log.finished_step) - 1)
        newest, committed = run.inventory.newest_complete(run.members.nodes()), run.checkpointer.committed
        reached = max(newest.step if newest else 0, committed.step if committed else 0)
        if (finishing := stories.past.finishing) is not None:
            state, reason = State(finishing[0]), finishing[1]
            if state != State.FINISHED or reached >= run.log.finished_step:
                self._ending.finish(state, reason)
                return
        cause = self._cause(stories)
        if not stories.past.waiting:
            run.record("trouble", generation=run.generation_count, cause=cause.kind, detail=cause.detail)
        if not self._ends_job(cause):
            self._form(cause)

    def _cause(self, stories: Stories) -> Trouble:
        """Why the generation could not go on. What its trainers said last counts, whoever had heard it before."""
        troubles = []
        for word, trouble in stories.last_words():
            if trouble.kind == "bad_step":
                self._bad_steps.refused(word["step"], trouble)
            troubles.append(trouble)
        return cause_of(troubles)
