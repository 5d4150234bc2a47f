"""The coordinator: the one place that decides membership, layout, what is restored, what is committed.

An asyncio server without any Ray in it; ``ray_actors`` puts it into an actor. Everything that happens arrives as a
message of a host, as the end of a host's connection, or by the watch, and leads to one of three things: a step is
finished, a new generation is formed, or the job ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from elastic_train.checkpoint.errors import Fenced
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.checkpointer import Checkpointer
from elastic_train.controller.copies import Copies
from elastic_train.controller.growth import Growth
from elastic_train.controller.hangs import culprit
from elastic_train.controller.host_server import HostServer
from elastic_train.controller.inventory import Inventory, SnapshotSet
from elastic_train.controller.job_folder import JobFolder, JobMismatch
from elastic_train.controller.members import (
    Generation,
    HostRecord,
    Trouble,
    order_members,
)
from elastic_train.controller.membership import Membership
from elastic_train.controller.preemption import LEFT, Preemption
from elastic_train.controller.rendezvous_client import Rendezvous
from elastic_train.controller.replanning import Replanning
from elastic_train.controller.restore_plan import RestorePlan, plan_restore
from elastic_train.controller.resumption import OpenedData, begin_from_source, open_data
from elastic_train.controller.returning import PastRun, Stories, Survey, Verdict
from elastic_train.controller.saving import Saving
from elastic_train.controller.setbacks import Setbacks, how_it_ended
from elastic_train.controller.step_log import StepLog
from elastic_train.controller.stragglers import Stragglers
from elastic_train.controller.time_account import TimeAccount
from elastic_train.controller.wire import Connection, Message
from elastic_train.planner.layouts import LayoutChoice
from elastic_train.storage import outage
from elastic_train.storage.errors import StorageError

logger = logging.getLogger(__name__)

_SETTLE_SECONDS = 0.03
"""The hosts of a node die together, and an echo may arrive before its cause: wait this long for the rest."""
_GRACE_SECONDS = 1.0
"""After we stood still all leases may be over: so long the hosts have to come back, with what they have in memory."""
_ALONE = ("trainer_killed", "trainer_crashed", "out_of_memory", "hang", "start", "growth")
"""What is told once, not by several ranks or hosts."""
_WATCH_SECONDS = 0.25
_ACCOUNT_SECONDS = 30.0
"""The time account is in the ledger at least this often."""

Listener = Callable[[dict[str, Any]], None]


def _superseded(error: Fenced) -> str:
    return f"another submission of this job has taken over: {error}"


class State(StrEnum):
    """Where the job is."""

    STARTING = "starting"  # hosts are coming
    RETURNING = "returning"  # the coordinator had died and hears what the hosts have done meanwhile
    WAITING = "waiting"  # fewer hosts than the job needs
    FORMING = "forming"  # a generation has been assigned and has not finished a step yet
    RUNNING = "running"
    FINISHING = "finishing"  # the last checkpoint is being written
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"  # stopped by the user

    @property
    def ended(self) -> bool:
        return self in (State.FINISHED, State.FAILED, State.KILLED)


class Coordinator:
    """Decides for one job.

    Args:
        job: with absolute URIs: hosts have other working directories.
        address: IP to listen on.
        token: secret that hosts show.
        on_event: called with each line of the ledger and, as ``{"event": "step", ...}``, of the steps.
        run_id: a coordinator of the same run takes the place of one that has died, and goes on with what its hosts do.
        port: to listen on; 0: any.
    """

    def __init__(self, job: Job, address: str, token: str, on_event: Listener, run_id: str = "", port: int = 0) -> None:
        self.job = job
        self.state = State.STARTING
        self.message = ""
        self.ended = asyncio.Event()
        self.generation: Generation | None = None
        self.traceback: str | None = None
        self._address, self._port, self._run_id = address, port, run_id
        self.on_opened: Callable[[JobFolder], None] = lambda folder: None
        """called on the event loop once the job folder is open, before anything is recorded"""
        self._on_event = on_event
        self._folder = JobFolder(job)
        self.members = Membership(self._record)
        self._server = HostServer(token, self._join, self._handle, self._lose, self._fail)
        self.log = StepLog(self._folder, on_event, self._record)
        self._inventory = Inventory()
        self._rendezvous = Rendezvous(address)
        self._checkpointer = Checkpointer(job, self._folder, self._inventory, self.members.hosts)
        self._saving = Saving(job, self._folder, self._checkpointer, self.spawn, self._record, self._on_superseded)
        self._copies = Copies(job.snapshot.partners, self._record)
        self._setbacks = Setbacks(job.failure.max_errors, self._record)
        self._preemption = Preemption(self._record)
        self._grace_until = 0.0
        self._parting = False
        """the state is being saved before hosts leave that alone may have it"""
        self._stragglers = Stragglers(job.failure, job.snapshot.partners, self.members.usable, self._record)
        self._bad_steps = BadSteps(job.failure, self.log.history, self._record)
        self._resume_at = 0.0
        """while waiting: when storage may be asked again"""
        self._layouts: dict[int, Layout] = {}
        self._generation_count = 0
        self._planned: asyncio.TimerHandle | None = None
        self._replanning = Replanning(job)
        self._growth = Growth(job, self._record)
        self._growth_due: str | None = None
        """why newcomers are taken in at the next step, if they are"""
        self.time = TimeAccount()
        self._accounted = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stories: Stories | None = None
        """while returning: what the hosts tell"""
        self._survey: Survey | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, int]:
        """Open the job folder, find where to go on, listen. Returns the address for the hosts.

        Raises:
            ConfigError, DataError, JobMismatch, StorageError: the job cannot be opened.
        """
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(None, open_data, self.job)
        await loop.run_in_executor(None, self._folder.open, data.digest)
        self._checkpointer.data_digest = data.digest
        if self.job.log.samples:
            self.log.samples = data.sample_ids
        self.on_opened(self._folder)
        opened = loop.run_in_executor(None, self._open_job, data)
        for result in await asyncio.gather(opened, self._rendezvous.start(), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result  # only now that neither is under way any more: ``close`` may follow
        address = await self._server.start(self._address, self._port)
        if self._stories is not None:
            self._stories.listen(time.monotonic())
        self.spawn(self._watch())
        self.spawn(self._saving.watch_claim())
        if self._stories is None and self.log.finished_step >= self.job.training.steps:
            self._end(State.FINISHED, f"step {self.log.finished_step} was already reached")
        return address

    def _open_job(self, data: OpenedData) -> None:
        past = PastRun.read(self._folder.decisions(), self._run_id) if self._run_id else PastRun()
        if past.superseded:
            raise JobMismatch(f"another submission of {self.job.name} has taken over from this run")
        step = self._saving.open()
        resumes = self._checkpointer.committed is not None
        self._generation_count = self._folder.last_generation()
        if not resumes:
            begin_from_source(self.job, data, self._folder.store)
        if past.began:
            self._come_back(past)
            return
        self._decide(run=self._run_id)
        self._folder.journal.flush()
        dropped = self.log.open(step)
        self.time.resumed(step, dropped)
        if dropped or resumes:
            self._record("resumed", step=step, steps_to_repeat=dropped)
        self._record("job_started", step=step, steps=self.job.training.steps)

    def stop(self, reason: str) -> None:
        """End the job gracefully: checkpoint the newest finished step, then let everybody go."""
        if self.state.ended or self.state == State.FINISHING:
            return
        if self._stories is not None and self._stories.past.finishing is not None:
            return
        self._record("stop_requested", reason=reason)
        if self._stories is not None:
            self._stories.past.finishing = State.KILLED, reason  # as soon as it is known what there is to save
        else:
            self._finish(State.KILLED, reason)

    def note_chaos(self, note: dict[str, Any]) -> None:
        """What follows was caused on purpose."""
        self._record("chaos", **note)

    def begin_outage(self, seconds: float) -> str:
        """Do without object storage for ``seconds``, hosts and coming trainers too; a sentence where there is none."""
        if not self.job.storage.uri.startswith("s3://"):
            return f"storage.uri={self.job.storage.uri} is no object storage; a job on s3:// can lose it"
        outage.begin(seconds)
        self.members.tell({"type": "outage", "seconds": seconds})
        return ""

    def _finish(self, state: State, reason: str) -> None:
        self.state = State.FINISHING
        self.time.finishing()
        self._decide(finishing=state.value, reason=reason)
        self._cancel_plan()
        self.members.tell({"type": "release"})
        self.spawn(self._finish_later(state, reason))

    async def _finish_later(self, state: State, reason: str) -> None:
        try:
            failure = await self._saving.save_last(self._newest)
        except Fenced as error:
            self._folder.abandon()
            state, reason = State.FAILED, _superseded(error)
        else:
            if failure is not None and state == State.FINISHED:
                state, reason = State.FAILED, f"the final checkpoint failed: {failure}"
        self._end(state, reason)

    def _newest(self) -> tuple[SnapshotSet | None, Layout | None, dict[str, Any]]:
        """The newest step that is whole in memory, its layout and its line."""
        snapshots = self._inventory.newest_complete(self.members.nodes())
        layout = self._layouts.get(snapshots.generation) if snapshots else None
        if snapshots is not None and self.state == State.FINISHING:  # else a generation may be on its way to that step
            self.log.catch_up(self.generation, snapshots.step)
        return snapshots, layout, self.log.last_line

    def _end(self, state: State, reason: str) -> None:
        self.state, self.message = state, reason
        self._stories = self._survey = None
        self._cancel_plan()
        self.time.end()
        self._account()
        self._record("job_finished", status=state.value, reason=reason, step=self.log.finished_step)
        self.members.tell({"type": "stop", "reason": state.value})
        self.ended.set()

    async def close(self) -> None:
        """After the end: wait for nothing, leave nothing behind."""
        for task in list(self._tasks):
            task.cancel()
        if not self.state.ended:
            self.members.tell({"type": "stop", "reason": "the coordinator is gone"})
        self._server.close()
        self.members.close()
        await self._rendezvous.close()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._folder.close)
        except StorageError as error:  # the job's end stands, whether storage takes the last lines or not
            logger.error("lines of the job's logs are lost: %s", error)

    def spawn(self, coroutine: Any) -> None:
        """Run it beside everything else until the end; if it fails, so does the job."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """An error of our own: better an end than a job that hangs."""
        logger.error("the coordinator failed", exc_info=error)
        if not self.state.ended:
            self._end(State.FAILED, f"error in the coordinator: {type(error).__name__}: {error}")

    def _decide(self, **decision: Any) -> None:
        """Journal it, with the right by which it is made: what a superseded coordinator decides is nothing."""
        claim = self._checkpointer.claim
        assert claim is not None
        self._folder.decide(claim=claim.number, **decision)

    def _record(self, event: str, **fields: Any) -> None:
        self._on_event(self._folder.record(event, **fields))

    def _account(self) -> None:
        """Where the hosts' time went so far."""
        self._accounted = time.monotonic()
        if (account := self.time.report())["host_seconds"]:
            self._record("time_account", step=self.log.finished_step, **account)

    # -- hosts ---------------------------------------------------------------------------------------------------

    def _join(self, connection: Connection, message: Message) -> HostRecord:
        if (before := self.members.superseded(message)) is not None:
            before.silent = True
            before.connection.abort()
            self._lose(before)
        number = message.get("host") if self._stories is not None else None
        host = self.members.join(connection, message, number)
        self.time.joined(host.number, back=number is not None and host.number == number)
        self._copies.joined(host.node)
        self._preemption.joined(host)
        if self._stories is not None:
            self._stories.join(message)
        else:
            for image in message["images"]:
                self._inventory.add(image["generation"], image["rank"], image["step"], host.node, image["image"])
        connection.send({"type": "welcome", "job_folder": self._folder.store.uri, "host": host.number})
        if self._survey is not None:
            self._survey.ask(host)
        if self.state.ended:
            connection.send({"type": "stop", "reason": self.state.value})
        return host

    def _lose(self, host: HostRecord) -> None:
        if self.members.hosts.get(host.number) is not host:
            return  # it is here again, over another connection
        self.members.leave(host)
        self._checkpointer.host_lost(host)
        if self._stories is not None:
            self._stories.lose(host)
        if self._survey is not None:
            self._survey.lose(host)
        if self.state.ended:
            return
        self._growth.host_lost()
        kind, how = "preemption", "has left its node"
        if not self._preemption.left(host):
            kind, how = ("host_silent", "is not heard any more") if host.silent else ("host_lost", "is gone")
            self._record(kind, host=host.number, node=host.node, pid=host.pid)
        if self.generation is not None and self.generation.has(host):
            heard = host.last_word(self.job.failure.lease_seconds)
            self._trouble(self.generation, Trouble(kind, f"{host.label} {how}", happened=heard))
        self.time.left(host.number)

    def _handle(self, host: HostRecord, message: Message) -> None:
        kind = message["type"]
        if kind == "heartbeat":
            self._on_heartbeat(host, message)
        elif kind == "ready":
            self.members.is_ready(host)
            self.time.ready(host.number)
        elif kind == "uploaded":
            self._checkpointer.uploaded(host, message)
        elif kind == "preemption_notice":
            self.drain(host.node, message["deadline_seconds"], message["reason"])
        elif self._stories is not None:
            self._on_story(self._stories, host, message)
        elif kind == "held":
            self._on_held(message)
        elif kind == "story":  # of a host that was cut off, and what it belonged to is over
            host.connection.send({"type": "release"})
        elif self.generation is not None and message.get("generation") == self.generation.number:
            self._on_trainer(host, self.generation, message)
        # Everything else is the echo of a generation that is over.

    def _on_heartbeat(self, host: HostRecord, message: Message) -> None:
        host.connection.send({"type": "beat", "sent": message["sent"]})
        generation = self.generation
        if generation is None or message["generation"] != generation.number:
            return
        if message["beats"] != host.beats:
            generation.last_progress = host.beats_since = time.time()
        host.beats, host.started_step, host.process = message["beats"], message["started_step"], message["process"]

    async def _watch(self) -> None:
        """What no message tells: leases, hangs, hosts that have settled."""
        while not self.state.ended:
            if self.members.cut_silent(asyncio.get_running_loop().time(), self.job.failure.lease_seconds):
                self._stood_still()
            self._watch_hang()
            self._watch_return()
            self._watch_newcomers()
            self._watch_copies()
            self._watch_leaving()
            if time.monotonic() - self._accounted >= _ACCOUNT_SECONDS:
                self._account()
            await asyncio.sleep(_WATCH_SECONDS)

    def _stood_still(self) -> None:
        """What seems to be late is our own doing."""
        self._grace_until = time.monotonic() + _GRACE_SECONDS
        if self.generation is not None:
            self.generation.last_progress = time.time()

    def _watch_hang(self) -> None:
        generation = self.generation
        if generation is None or self.state not in (State.FORMING, State.RUNNING) or generation.troubles:
            return
        still = time.time() - generation.last_progress
        if still > self.job.failure.hang_seconds:
            detail = f"no rank made progress for {still:.1f} s: {culprit(generation, time.time())}"
            self._trouble(generation, Trouble("hang", detail, happened=generation.last_progress))

    def _watch_newcomers(self) -> None:
        if self.state == State.STARTING:
            ready, first = self.members.ready_count(), self.members.first_ready
            waited = first is not None and time.time() - first >= self.job.hosts.start_wait_seconds
            if ready >= self.job.hosts.max or (waited and ready >= self.job.hosts.min):
                self._form(Trouble("start", f"{ready} hosts are ready"))
        elif self.state == State.WAITING:
            hosts, asked = self.members.usable(), time.monotonic() >= self._resume_at
            if asked and self._choice(hosts) is not None and not self._more_may_come(hosts):
                again = self._resume_at > 0
                self._form(Trouble("storage", "asking again") if again else Trouble("growth", "enough hosts are back"))
        elif self.state == State.RUNNING and self.generation is not None:
            settled = [host for host in self.members.usable() if self._settled(host) and not host.slow]
            self._growth_due = self._growth.consider(self._choice(settled), self.log.finished_step)

    def _more_may_come(self, hosts: list[HostRecord]) -> bool:
        """Hosts have just come, and with what they have in memory the job would be set back: others may have it."""
        newest = max((host.ready_since or 0.0 for host in hosts), default=0.0)
        if time.time() - newest >= self.job.hosts.settle_seconds:
            return False
        return self._restorable().step < self.log.finished_step

    def _restorable(self) -> RestorePlan:
        saved = self._checkpointer.committed, self._checkpointer.committed_generation
        return plan_restore(self._inventory, self.members.nodes(), *saved)

    def _watch_copies(self) -> None:
        """Nodes get full and are tried again: tell the hosts where their copies go from now on."""
        generation = self.generation
        if generation is None or self.state not in (State.FORMING, State.RUNNING):
            return
        before, generation.partners = generation.partners, self._copies.choose(generation.members)
        changed = [rank for rank, partners in enumerate(generation.partners) if partners != before[rank]]
        self._tell_partners(generation, changed)

    def _tell_partners(self, generation: Generation, ranks: Iterable[int]) -> None:
        for rank in ranks:
            told = [partner.as_partner() for partner in generation.partners[rank]]
            message = {"type": "partners", "generation": generation.number, "partners": told}
            generation.members[rank].connection.send(message)

    # -- nodes that are taken away -------------------------------------------------------------------------------

    def drain(self, node: str, deadline_seconds: float | None, reason: str) -> None:
        """``node`` ends in so many seconds (None: it is not known when): go on without its hosts, and let them end.

        Its images can be read while it is still there, so no finished step is lost, and with a step to be finished
        before a part of that time has passed none at all.
        """
        if self.state.ended:
            return
        hosts = self.members.by_node.get(node, ())
        if self._preemption.notice(node, deadline_seconds, reason, hosts) and self.state == State.WAITING:
            self._save_before_parting()
        self._watch_leaving()

    def _watch_leaving(self) -> None:
        generation = self.generation
        if generation is not None and self.state in (State.FORMING, State.RUNNING) and not generation.refusing:
            cause = self._preemption.cause(generation) if self._preemption.presses(generation) else None
            if cause is not None and not generation.troubles:
                self._form(cause)
        for host in self._preemption.to_tell(self.members.hosts.values(), self._is_needed):
            host.connection.send({"type": "stop", "reason": LEFT})

    def _is_needed(self, host: HostRecord) -> bool:
        """Whether a host that leaves computes, or may have on its node what is nowhere else yet."""
        if self._checkpointer.running is not None or self.state == State.FINISHING:
            return True
        if self._stories is not None:
            return True  # it is not known yet
        if self.generation is None:
            return self._parting
        return self.generation.has(host) or self.generation.first_step_at is None

    def _save_before_parting(self) -> None:
        """Nobody computes, and hosts leave: their state must be in storage first."""
        if not self._parting and any(host.leaving for host in self.members.hosts.values()):
            self._parting = True
            self.spawn(self._save_parting())

    async def _save_parting(self) -> None:
        try:
            await self._saving.save_last(self._newest)
        except Fenced as error:
            self._on_superseded(error)
        finally:
            self._parting = False
        self._watch_leaving()

    def _settled(self, host: HostRecord) -> bool:
        assert self.generation is not None
        waited = time.time() - (host.ready_since or 0.0)
        return self.generation.has(host) or waited >= self.job.hosts.settle_seconds

    # -- coming back ---------------------------------------------------------------------------------------------

    def _come_back(self, past: PastRun) -> None:
        """This run has had a coordinator before: its hosts know what has been done since that died."""
        self.log.go_on()
        if past.decisions and self.log.last_line.get("generation", 0) < past.decisions[-1].generation:
            self.log.roll_back(past.decisions[-1].step)  # that had not come to storage
        self._bad_steps.resumed(self.log.last_line)
        self.members.count_from(self._folder.last_host())
        self.time.resumed(self.log.finished_step, 0)
        self.time.returned(self._folder.last_account())
        past.replay(self._inventory)
        self._layouts = {decision.generation: decision.layout for decision in past.decisions}
        self._stories = Stories(past, self.job.failure.lease_seconds)
        self.state = State.RETURNING
        self._decide(returned=True)
        self._record("coordinator_returned", step=self.log.finished_step, generation=self._generation_count)

    def _on_story(self, stories: Stories, host: HostRecord, message: Message) -> None:
        if message["type"] != "surveyed":
            stories.tell(host, message)
        elif self._survey is not None:
            self._survey.tell(host, message)

    def _watch_return(self) -> None:
        stories, now = self._stories, time.monotonic()
        if stories is None:
            return
        if self._survey is not None:
            if self._survey.over(now):
                self._go_on_from_memory(stories, self._survey)
        elif (verdict := stories.verdict(now, self.log.finished_step)) is Verdict.ADOPT:
            self._adopt(stories)
        elif verdict is Verdict.BEGIN:
            self._begin()
        elif verdict is Verdict.REPLACE:
            self._survey = Survey(now)
            for host in self.members.hosts.values():
                self._survey.ask(host)

    def _begin(self) -> None:
        """The coordinator had died before there was a generation."""
        self._stories = None
        self.state = State.STARTING
        if self.log.finished_step >= self.job.training.steps:
            self._end(State.FINISHED, f"step {self.log.finished_step} was already reached")

    def _know(self, stories: Stories) -> Generation | None:
        """The generation that the hosts have told of, with the steps of it that are not logged yet."""
        self._stories = self._survey = None
        if (newest := stories.decision) is not None and newest.generation not in self._layouts:
            self._inventory.open_generation(newest.generation, newest.layout.world_size)
            self._layouts[newest.generation] = newest.layout
            self._generation_count = max(newest.generation, self._generation_count)
        return stories.rebuilt(self.log.finished_step)

    def _adopt(self, stories: Stories) -> None:
        """All trainers step on: nothing but what they have done meanwhile has to be written down."""
        generation, before = self._know(stories), self.log.finished_step
        assert generation is not None and stories.decision is not None
        self.generation = generation
        number, generation.partners = generation.number, self._copies.choose(generation.members)
        known = self.log.last_line.get("generation") == number
        stories.describe(number, self._inventory)
        self.log.catch_up(generation, stories.finished_step)
        self.time.adopted((member.number for member in generation.members), self.log.finished_step)
        self._saving.returned(self.log.finished_step)
        self._growth.formed(stories.decision.choice(self.job))
        self.state = State.FORMING
        if known:
            self.state, generation.first_step_at = State.RUNNING, generation.formed
        elif self.log.finished_step > generation.start_step:
            self._on_first_step(generation)
        self._record(
            "generation_adopted", generation=number, step=self.log.finished_step, steps=self.log.finished_step - before
        )
        self._tell_partners(generation, range(len(generation.members)))
        self.members.tell(self._news("adopted", number))
        for step in sorted(generation.stepped):
            self._finish_if_whole(number, step)
        if (reason := self._bad_steps.step_finished(self.log.last_line)) is not None:
            self._finish(State.FAILED, reason)
        for host, message in stories.later:
            self._handle(host, message)
        if self.log.finished_step >= self.job.training.steps and self.state in (State.FORMING, State.RUNNING):
            self._finish(State.FINISHED, f"all {self.log.finished_step} steps are done")

    def _go_on_from_memory(self, stories: Stories, survey: Survey) -> None:
        """Form a generation from the images there are, or end as it had been decided."""
        self.generation = self._know(stories)
        survey.fill(self._inventory)
        self._inventory.give_up_after(stories.first_unknown(self.log.finished_step) - 1)
        newest, committed = self._inventory.newest_complete(self.members.nodes()), self._checkpointer.committed
        reached = max(newest.step if newest else 0, committed.step if committed else 0)
        if (finishing := stories.past.finishing) is not None:
            state, reason = State(finishing[0]), finishing[1]
            if state != State.FINISHED or reached >= self.log.finished_step:
                self._finish(state, reason)
                return
        cause = stories.cause()
        if not stories.past.waiting:
            self._record("trouble", generation=self._generation_count, cause=cause.kind, detail=cause.detail)
        self._form(cause)

    # -- trainers ------------------------------------------------------------------------------------------------

    def _on_trainer(self, host: HostRecord, generation: Generation, message: Message) -> None:
        kind, rank = message["type"], message["rank"]
        generation.last_progress = time.time()
        if kind == "forked":
            host.trainer_pid = message["pid"]
            self._on_phase(generation, "forked")
        elif kind == "phase":
            self._on_phase(generation, message["name"], message["seconds"])
        elif kind == "restored":
            for source, count in message["bytes"].items():
                generation.restored[source] = generation.restored.get(source, 0) + count
            if message["passed_over"]:
                self._record("restore_passed_over", rank=rank, detail="; ".join(message["passed_over"]))
        elif kind == "described":
            self._on_described(host, generation, rank, message["description"])
        elif kind == "stepped":
            generation.says(rank, message)
            self._hold(generation.number, rank, message["step"], host.node, message["image"])
        elif kind == "error":
            self._on_error(host, generation, message)
        elif kind == "trainer_ended":
            host.trainer_pid = None
            self._trouble(generation, how_it_ended(host, message))
        elif kind == "copy_refused":
            self._on_refused_copy(generation, message)
        elif kind == "copy_failed":
            self._trouble(generation, Trouble("copy_failed", f"rank {rank}: {message['error']}"))

    def _on_phase(self, generation: Generation, name: str, seconds: float = 0.0) -> None:
        begins = generation.formation.did(name, time.time(), seconds)
        if begins is not None and not generation.troubles:
            self.time.enter(begins)

    def _on_described(self, host: HostRecord, generation: Generation, rank: int, text: str) -> None:
        """A trainer has built its part of the model: now it is known which images it needs."""
        needs = self._inventory.describe(generation.number, rank, text)
        restore = generation.restore
        if restore is not None and restore.snapshots is not None:
            ranks = restore.directions(rank, host.node, needs, self.members.by_node, self._inventory)
            host.connection.send({"type": "directions", "generation": generation.number, "ranks": ranks})

    def _on_refused_copy(self, generation: Generation, message: Message) -> None:
        """A partner's node is full: the step, and those to come, do without its copy."""
        generation.is_refused(message["step"], message["rank"], message["node"])
        self._copies.refused(message["node"], message["error"])
        self._watch_copies()
        self._finish_if_whole(generation.number, message["step"])

    def _on_held(self, message: Message) -> None:
        self._hold(message["generation"], message["rank"], message["step"], message["node"], message["image"])

    def _hold(self, number: int, rank: int, step: int, node: str, image: str) -> None:
        if self._inventory.add(number, rank, step, node, image) is not None:
            self._finish_if_whole(number, step)

    def _finish_if_whole(self, number: int, step: int) -> None:
        if self.state.ended or self.state == State.FINISHING:
            return  # the last checkpoint is being written; a step that is logged now would not be in it
        generation, snapshots = self.generation, self._inventory.find(number, step)
        if generation is None or number != generation.number or step != self.log.finished_step + 1:
            return
        if snapshots is not None and generation.holds(snapshots):
            self._on_finished(generation, snapshots)

    def _on_finished(self, generation: Generation, snapshots: SnapshotSet) -> None:
        """A step is whole on every rank and every partner: it can no longer be lost to a single failure."""
        step = snapshots.step
        said = generation.stepped[step]
        self.time.step_finished(step, {generation.members[rank].number: told for rank, told in said.items()})
        straggler = self._stragglers.look(generation, step)
        self.log.append(generation, step)
        self._inventory.supersede(snapshots)
        self._setbacks.step_finished()
        if generation.first_step_at is None:
            self._on_first_step(generation)
        if (reason := self._bad_steps.step_finished(self.log.last_line)) is not None:
            self._finish(State.FAILED, reason)
            return
        if step >= self.job.training.steps:
            self._finish(State.FINISHED, f"all {step} steps are done")
            return
        self._saving.step_finished(generation, snapshots, self.log.last_line)
        self._growth.step_finished(self.log.last_line["seconds"])
        due = self._preemption.cause(generation)
        if due is None:
            due = Trouble("growth", self._growth_due) if self._growth_due is not None else straggler
        if due is not None and not generation.troubles:
            self._account()
            self._form(due)
        else:
            for member in generation.members:
                member.connection.send(self._news("finished", generation.number))

    def _news(self, kind: str, generation: int) -> Message:
        """How far the job is, for the hosts."""
        return {
            "type": kind,
            "generation": generation,
            "step": self.log.finished_step,
            "stored": self.log.stored_step,
        }

    def _on_first_step(self, generation: Generation) -> None:
        generation.first_step_at = time.time()
        seconds = generation.formation.seconds(generation.first_step_at)
        self._growth.running(generation.cause.kind, seconds["recovery_seconds"] - seconds["detection_seconds"])
        self._saving.new_layout(generation)
        self.state = State.RUNNING
        self.members.tell({"type": "discard", "before_generation": generation.number})
        self._record(
            "generation_formed",
            generation=generation.number,
            layout=str(generation.layout),
            reason=generation.reason,
            hosts=len(generation.members),
            spares=sum(not generation.has(host) for host in self.members.usable()),
            step=generation.start_step,
            cause=generation.cause.kind,
            detail=generation.cause.detail,
            **seconds,
            phases=generation.formation.phases,
            restored_bytes=generation.restored,
        )
        self._account()

    def _on_superseded(self, error: Fenced) -> None:
        if not self.state.ended and self.state != State.FINISHING:  # the last commit will find out by itself
            self._folder.abandon()
            self._end(State.FAILED, _superseded(error))

    # -- generations ---------------------------------------------------------------------------------------------

    def _on_error(self, host: HostRecord, generation: Generation, message: Message) -> None:
        kind, rank = message["kind"], message["rank"]
        detail = f"rank {rank}, step {message['step']}, {host.label}: {message['error']}"
        if kind == "no_room":
            self._setbacks.no_room(host, generation, message["sentence"])
        if kind == "unreadable":
            dropped = [self._drop(generation, copy["rank"], copy["node"]) for copy in message["copies"]]
            if not any(dropped):
                kind = "exception"  # it would be chosen again
        trouble = Trouble(kind, detail, traceback=message["traceback"])
        if kind == "bad_step":
            self._bad_steps.refused(message["step"], trouble)
        self._trouble(generation, trouble)

    def _drop(self, generation: Generation, rank: int, node: str) -> bool:
        """Forget an image that could not be restored."""
        source = generation.restore.snapshots if generation.restore is not None else None
        return source is not None and self._inventory.drop(source.generation, rank, source.step, node)

    def _trouble(self, generation: Generation, trouble: Trouble) -> None:
        if generation is not self.generation or self.state not in (State.FORMING, State.RUNNING) or generation.refusing:
            return
        generation.troubles.append(trouble)
        self.time.failed(trouble.began, trouble.seen)
        if self._planned is None:
            delay = 0.0 if trouble.kind in _ALONE else _SETTLE_SECONDS
            self._planned = asyncio.get_running_loop().call_later(delay, self._replan_or_fail)

    def _cancel_plan(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None

    def _replan_or_fail(self) -> None:
        try:
            self._replan()
        except Exception as error:
            self._fail(error)

    def _replan(self) -> None:
        assert self.generation is not None
        if time.monotonic() < self._grace_until and not self.members.all_there(self.generation.members):
            self._planned = asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._replan_or_fail)
            return
        self._planned = None
        troubles = self.generation.troubles
        cause = next((trouble for trouble in troubles if not trouble.is_echo), troubles[0])
        cause.happened = min(trouble.began for trouble in troubles)
        cause.seen = min(trouble.seen for trouble in troubles)
        self._record("trouble", generation=self.generation.number, cause=cause.kind, detail=cause.detail)
        self._account()
        self._saving.schedule.trouble()
        if (reason := self._setbacks.reason_to_end(cause)) is not None:
            self.traceback = cause.traceback
            self._finish(State.FAILED, reason)
        elif cause.kind == "damaged":
            self.generation.refusing = True
            self.spawn(self._refuse_checkpoint(cause))
        elif cause.kind == "storage":
            self._wait_for_storage(cause, cause.detail)
        else:
            self._form(cause)

    def _wait_for_storage(self, cause: Trouble, detail: str) -> None:
        seconds = self._setbacks.storage_pause()
        self._resume_at = time.monotonic() + seconds
        self.message = f"storage does not answer, trying again in {seconds:.0f} s: {detail}"
        self._wait(cause)

    async def _refuse_checkpoint(self, cause: Trouble) -> None:
        """A rank found the checkpoint damaged while it loaded: everybody goes back to the one before."""
        try:
            await self._saving.fall_back(cause.detail)
        except Fenced as error:
            self._on_superseded(error)
        except StorageError as error:
            self._wait_for_storage(cause, str(error))  # then the checkpoint is tried, and found damaged, again
        else:
            self._form(cause)

    def _choice(self, hosts: list[HostRecord]) -> LayoutChoice | None:
        choice = self._replanning.choose(hosts, filter(lambda host: host.full, self.members.hosts.values()))
        if choice is None:
            self.message = self._replanning.problem
        return choice

    def _form(self, cause: Trouble) -> None:
        """Assign the next generation to the hosts that are there, or wait for more of them."""
        if self.state.ended or self.state == State.FINISHING:
            return  # meanwhile
        self._cancel_plan()
        self._growth_due, self._resume_at = None, 0.0
        choice = self._choice(self.members.usable())
        restore = self._restorable()
        self.log.catch_up(self.generation, restore.step)
        if self.log.finished_step >= self.job.training.steps and restore.step >= self.log.finished_step:
            self._finish(State.FINISHED, f"all {self.log.finished_step} steps are done")
            return
        if choice is None:
            self._wait(cause)  # not yet rolled back: the hosts to come may find snapshots of this step on their nodes
            return
        if self.log.roll_back(restore.step):
            self._saving.go_back(restore.step)
        self._inventory.give_up_after(restore.step)
        self._generation_count += 1
        number, layout = self._generation_count, choice.layout
        nodes_wanted = 1 + self.job.snapshot.partners
        members = order_members(self._stragglers.candidates(layout), layout.world_size, layout.tp, nodes_wanted)
        partners = self._copies.choose(members)
        self._decide(
            generation=number,
            layout=layout.as_dict(),
            step=restore.step,
            cause=cause.kind,
            reason=choice.reason,
            cost=choice.cost,
        )
        self.generation = Generation(number, layout, members, partners, restore.step, cause, finished_step=restore.step)
        self.time.formed((member.number for member in members), restore.step, starts=cause.kind == "start")
        self.generation.restore = restore
        self.generation.reason = choice.reason
        self._growth.formed(choice)
        self.state, self.message = State.FORMING, ""
        self._inventory.open_generation(number, layout.world_size)
        self._layouts[number] = layout
        for rank, member in enumerate(members):
            member.beats, member.started_step, member.process, member.trainer_pid = 0, 0, "", None
            member.connection.send(self._assignment(rank, restore))
        self.members.tell({"type": "release"}, but=self.generation.has)

    def _wait(self, cause: Trouble) -> None:
        self.generation = None
        self.state = State.WAITING
        self.time.waiting()
        self._inventory.give_up_after(self.log.finished_step)
        self._decide(waiting_after=self.log.finished_step)
        self._record("waiting", cause=cause.kind, detail=cause.detail, reason=self.message)
        self.members.tell({"type": "release"})
        self._save_before_parting()

    def _assignment(self, rank: int, restore: RestorePlan) -> Message:
        generation = self.generation
        assert generation is not None
        return {
            "type": "assign",
            "generation": generation.number,
            "rank": rank,
            "layout": generation.layout.as_dict(),
            "store": list(self._rendezvous.endpoint),
            "start_step": generation.start_step,
            "restore": restore.summary(generation.members[rank].node),
            "partners": [partner.as_partner() for partner in generation.partners[rank]],
            **self._bad_steps.assignment(),
        }
