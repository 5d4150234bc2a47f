"""The next generation: its layout, its members, where it goes on; or the wait for more hosts, or for storage."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.copies import Copies
from elastic_train.controller.current_run import CurrentRun, State
from elastic_train.controller.generation import Generation
from elastic_train.controller.growth import Growth
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.members import order_members
from elastic_train.controller.rendezvous_client import Rendezvous
from elastic_train.controller.replanning import Replanning
from elastic_train.controller.restore_plan import RestorePlan, plan_restore
from elastic_train.controller.saving import Saving
from elastic_train.controller.stragglers import Stragglers
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message
from elastic_train.planner.layouts import LayoutChoice


class Forming:
    """Decides what computes next, and from which step on.

    Args:
        rendezvous: where the trainers of a generation meet.
        finish: ends the job when all of its steps turn out to be done.
        on_wait: called once nothing computes any more.
    """

    def __init__(
        self,
        run: CurrentRun,
        rendezvous: Rendezvous,
        saving: Saving,
        growth: Growth,
        copies: Copies,
        stragglers: Stragglers,
        bad_steps: BadSteps,
        finish: Callable[[State, str], None],
        on_wait: Callable[[], None],
    ) -> None:
        self._run, self._rendezvous, self._saving, self._growth = run, rendezvous, saving, growth
        self._copies, self._stragglers, self._bad_steps = copies, stragglers, bad_steps
        self._finish, self._on_wait = finish, on_wait
        self._replanning = Replanning(run.job)
        self.resume_at = 0.0
        """when a pause is over, in seconds of a monotonic clock; 0 without one"""
        self.paused_for: str | None = None
        """kind of the trouble that the pause is for"""

    def choice(self, hosts: list[HostRecord]) -> LayoutChoice | None:
        """The best layout on ``hosts``; None, and the run's ``message``, when they are too few."""
        full = (host for host in self._run.members.hosts.values() if host.full)
        choice = self._replanning.choose(hosts, full)
        if choice is None:
            self._run.message = self._replanning.problem
        return choice

    def restorable(self) -> RestorePlan:
        """The newest step that can be gone on from, with the nodes that are there now."""
        run, saved = self._run, self._run.checkpointer
        return plan_restore(run.inventory, run.members.nodes(), saved.committed, saved.committed_generation)

    def can_do_without(self, hosts: list[HostRecord]) -> bool:
        """Whether there is a layout on the others."""
        others = [host for host in self._run.members.usable() if not host.suspected and host not in hosts]
        return self._replanning.choose(others) is not None

    def catch_up(self) -> RestorePlan:
        """Log what is whole everywhere, only its last message had not arrived; returns from where to go on."""
        run = self._run
        if run.generation is not None:
            run.inventory.give_up_after(run.generation.newest_told)  # what nobody told of could not be logged
        restore = self.restorable()
        run.log.catch_up(run.generation, restore.step)
        return restore

    def form(self, cause: Trouble) -> None:
        """Assign the next generation to the hosts that are there, or wait for more of them."""
        run = self._run
        if run.state.ending:
            return  # meanwhile
        self.resume_at, self.paused_for = 0.0, None
        usable, restore = run.members.usable(), self.catch_up()
        choice = self.choice([host for host in usable if not host.suspected]) or self.choice(usable)
        if run.is_done and restore.step >= run.log.finished_step:
            self._finish(State.FINISHED, f"all {run.log.finished_step} steps are done")
            return
        if choice is None:
            self._wait(cause)  # not yet rolled back: the hosts to come may find snapshots of this step on their nodes
            return
        if run.log.roll_back(restore.step):
            self._saving.go_back(restore.step)
        run.inventory.give_up_after(restore.step)
        self._assign(self._new_generation(cause, choice, restore), restore)

    def _new_generation(self, cause: Trouble, choice: LayoutChoice, restore: RestorePlan) -> Generation:
        run, layout, number = self._run, choice.layout, self._run.generation_count + 1
        nodes_wanted = 1 + run.job.snapshot.partners
        members = order_members(self._stragglers.candidates(layout), layout.world_size, layout.tp, nodes_wanted)
        partners = self._copies.choose(members)
        run.decide(
            generation=number,
            layout=layout.as_dict(),
            step=restore.step,
            cause=cause.kind,
            reason=choice.reason,
            cost=choice.cost,
        )
        generation = Generation(number, layout, members, partners, restore.step, cause, finished_step=restore.step)
        generation.restore, generation.reason = restore, choice.reason
        run.time.formed(
            (member.number for member in members),
            restore.step,
            starts=cause.kind == "start",
            skipped="skipped" in run.log.last_line,
        )
        self._growth.formed(choice)
        return generation

    def _assign(self, generation: Generation, restore: RestorePlan) -> None:
        run = self._run
        run.generation = generation
        run.state, run.message = State.FORMING, ""
        run.open_generation(generation.number, generation.layout)
        for rank, member in enumerate(generation.members):
            member.beats, member.started_step, member.process, member.trainer_pid = 0, 0, "", None
            member.connection.send(self._assignment(generation, rank, restore))
        run.members.tell({"type": "release"}, but=generation.has)

    def _assignment(self, generation: Generation, rank: int, restore: RestorePlan) -> Message:
        return {
            "type": "assign",
            "generation": generation.number,
            "rank": rank,
            "layout": generation.layout.as_dict(),
            "store": list(self._rendezvous.endpoint),
            "start_step": generation.start_step,
            "restore": restore.summary(generation.members[rank].node),
            "partners": generation.told_partners(rank),
            **self._bad_steps.assignment(),
        }

    def wait_for_storage(self, cause: Trouble, detail: str, seconds: float) -> None:
        """Nothing can be restored as storage does not answer, says ``detail``; it is asked again in ``seconds``."""
        self.pause(cause, f"storage does not answer, trying again in {seconds:.0f} s: {detail}", seconds, "storage")

    def pause(self, cause: Trouble, message: str, seconds: float, paused_for: str) -> None:
        """Form nothing for so many ``seconds``, although there are hosts; ``message`` tells people why."""
        self.resume_at, self.paused_for = time.monotonic() + seconds, paused_for
        self._run.message = message
        self._wait(cause)

    def _wait(self, cause: Trouble) -> None:
        run = self._run
        if run.state.ending:
            return  # meanwhile
        run.generation = None
        run.state = State.WAITING
        run.time.waiting()
        run.inventory.give_up_after(run.log.finished_step)
        run.decide(waiting_after=run.log.finished_step)
        run.record("waiting", cause=cause.kind, detail=cause.detail, reason=run.message)
        run.members.tell({"type": "release"})
        self._on_wait()
