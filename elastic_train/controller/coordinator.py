"""The coordinator: the one place that decides membership, layout, what is restored, what is committed.

An asyncio server without any Ray in it; ``ray_actors`` puts it into an actor. Everything that happens arrives as a
message of a host, as the end of a host's connection, or by the watch, and leads to one of three things: a step is
finished (``finished_steps``), a new generation is formed (``forming``), or the job ends (``ending``).

Here it is only passed on. What the parts share is the ``CurrentRun``; each decides one thing, and causes what follows
through the callables it was given:

    hosts come and go   membership, leaving (nodes that are taken away), newcomers
    trainers say        trainer_messages -> finished_steps, directions (where a rank's state is), troubles
    nobody says         hangs, copies (nodes that get full), leases
    troubles            -> forming, or ending
    coming_back         after the death of the coordinator before: -> the running generation is adopted, or forming
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from elastic_train.config.job import Job
from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.barren import Barren
from elastic_train.controller.coming_back import ComingBack
from elastic_train.controller.copies import Copies
from elastic_train.controller.current_run import CurrentRun, Listener, State
from elastic_train.controller.directions import Directions
from elastic_train.controller.ending import Ending
from elastic_train.controller.finished_steps import FinishedSteps
from elastic_train.controller.forming import Forming
from elastic_train.controller.generation import Generation
from elastic_train.controller.growth import Growth
from elastic_train.controller.hangs import hang
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.host_server import HostServer
from elastic_train.controller.job_folder import JobFolder, JobMismatch
from elastic_train.controller.lease import heartbeat_seconds
from elastic_train.controller.leaving import Leaving
from elastic_train.controller.membership import Membership
from elastic_train.controller.newcomers import Newcomers
from elastic_train.controller.preemption import Preemption
from elastic_train.controller.rendezvous_client import Rendezvous
from elastic_train.controller.resumption import OpenedData, begin_from_source, open_data
from elastic_train.controller.returning import PastRun
from elastic_train.controller.saving import Saving
from elastic_train.controller.setbacks import Setbacks
from elastic_train.controller.step_log import StepLog
from elastic_train.controller.stragglers import Stragglers
from elastic_train.controller.trainer_messages import TrainerMessages
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.troubles import Troubles
from elastic_train.controller.wire import Connection, Message
from elastic_train.storage import outage
from elastic_train.storage.errors import StorageError

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.25
_NOTE_SECONDS = 2.0
_ACCOUNT_SECONDS = 30.0
"""The time account is in the ledger at least this often."""


class Coordinator:
    """Decides for one job.

    Args:
        job: with absolute URIs: hosts have other working directories.
        address: IP to listen on.
        token: secret that hosts show.
        on_event: called with each line of the ledger and, as ``{"event": "step", ...}``, of the steps.
        run_id: a coordinator of the same run takes the place of one that has died, and goes on with what its hosts do.
        port: to listen on; 0: any.
        rendezvous: started and closed with the coordinator. Default: a store in a new process, on ``address``.
    """

    def __init__(
        self,
        job: Job,
        address: str,
        token: str,
        on_event: Listener,
        run_id: str = "",
        port: int = 0,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.job = job
        self._address, self._port, self._run_id = address, port, run_id
        self.on_opened: Callable[[JobFolder], None] = lambda folder: None
        """called on the event loop once the job folder is open, before anything is recorded"""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = HostServer(token, self._join, self._handle, self._lose, self._fail)
        self._rendezvous = rendezvous or Rendezvous(address)
        self.run = run = CurrentRun(job, on_event)
        """where the job is: for those who look, and for the parts"""
        self._connect_parts(run)

    def _connect_parts(self, run: CurrentRun) -> None:
        """Each gets what it uses. (The two lambdas close a circle: what they call is made later.)"""
        job = run.job
        self._growth = growth = Growth(job, run.record)
        self._copies = copies = Copies(job.snapshot.partners, run.members.hosts.values, run.record)
        self._preemption = preemption = Preemption(run.record)
        setbacks = Setbacks(job.failure.max_errors, run.record)
        stragglers = Stragglers(job.failure, job.snapshot.partners, run.members.usable, run.record)
        bad_steps = BadSteps(job.failure, run.log.history, run.record)
        self._saving = saving = Saving(
            job, run.folder, run.checkpointer, self.spawn, run.record, lambda error: self._ending.superseded(error)
        )
        self._ending = ending = Ending(run, saving, self.spawn)
        forming = Forming(
            run,
            self._rendezvous,
            saving,
            growth,
            copies,
            stragglers,
            bad_steps,
            ending.finish,
            lambda: self._leaving.save_first(),
        )
        self._leaving = Leaving(run, preemption, ending, forming.form, self.spawn)
        self._newcomers = Newcomers(run, forming, growth)
        barren = Barren(job.failure.max_barren_generations, run.record, forming.can_do_without)
        self._troubles = troubles = Troubles(run, setbacks, barren, saving, forming, ending, self.spawn, self._fail)
        self._finished_steps = finished_steps = FinishedSteps(
            run, saving, growth, preemption, stragglers, bad_steps, setbacks, forming.form, ending.finish
        )
        self._directions = directions = Directions(run, self.spawn)
        self._trainer_messages = TrainerMessages(
            run, finished_steps, copies, bad_steps, setbacks, directions, troubles.add
        )
        self._coming_back = ComingBack(
            run,
            saving,
            growth,
            copies,
            bad_steps,
            finished_steps,
            ending,
            forming.form,
            troubles.ends_job,
            self._handle,
        )

    # -- for those who look --------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.run.state

    @property
    def message(self) -> str:
        """What the job waits for, or why it has ended."""
        return self.run.message

    @property
    def generation(self) -> Generation | None:
        return self.run.generation

    @property
    def members(self) -> Membership:
        return self.run.members

    @property
    def log(self) -> StepLog:
        return self.run.log

    @property
    def ended(self) -> asyncio.Event:
        """Set once the job has ended."""
        return self._ending.ended

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> tuple[str, int]:
        """Open the job folder, find where to go on, listen. Returns the address for the hosts.

        Raises:
            ConfigError, DataError, JobMismatch, StorageError: the job cannot be opened.
        """
        loop, run = asyncio.get_running_loop(), self.run
        data = await loop.run_in_executor(None, open_data, self.job)
        await loop.run_in_executor(None, run.folder.open, data.digest)
        run.checkpointer.data_digest = data.digest
        if self.job.log.samples:
            run.log.samples = data.sample_ids
        self.on_opened(run.folder)
        opened = loop.run_in_executor(None, self._open_job, data)
        for result in await asyncio.gather(opened, self._rendezvous.start(), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result  # only now that neither is under way any more: ``close`` may follow
        address = await self._server.start(self._address, self._port)
        self._coming_back.listen()
        self.spawn(self._watch())
        self.spawn(self._saving.watch_claim())
        if run.state != State.RETURNING and run.is_done:
            self._ending.end(State.FINISHED, f"step {run.log.finished_step} was already reached")
        return address

    def _open_job(self, data: OpenedData) -> None:
        run = self.run
        past = PastRun.read(run.folder.decisions(), self._run_id) if self._run_id else PastRun()
        if past.superseded:
            raise JobMismatch(f"another submission of {self.job.name} has taken over from this run")
        step = self._saving.open()
        resumes = run.checkpointer.committed is not None
        run.generation_count = run.folder.last_generation()
        if not resumes:
            begin_from_source(self.job, data, run.folder.store)
        if past.began:
            self._coming_back.begin(past)
            return
        run.decide(run=self._run_id)
        run.folder.journal.flush()
        dropped = run.log.open(step)
        run.time.resumed(step, dropped)
        if dropped or resumes:
            run.record("resumed", step=step, steps_to_repeat=dropped)
        run.record("job_started", step=step, steps=self.job.training.steps)

    def stop(self, reason: str) -> None:
        """End the job gracefully: checkpoint the newest finished step, then let everybody go."""
        if self.state.ending or self._coming_back.will_end:
            return
        self.run.record("stop_requested", reason=reason)
        if self.state == State.RETURNING:
            self._coming_back.end_with(State.KILLED, reason)
        else:
            self._ending.finish(State.KILLED, reason)

    async def note_chaos(self, note: dict[str, Any]) -> None:
        """What follows was caused on purpose. Storage has the line first, if it answers: we may be what is killed."""
        self.run.record("chaos", **note)
        with suppress(StorageError):
            await asyncio.get_running_loop().run_in_executor(None, self.run.folder.ledger.flush, _NOTE_SECONDS)

    def begin_outage(self, seconds: float) -> str:
        """Do without object storage for ``seconds``, hosts and coming trainers too; a sentence where there is none."""
        if not self.job.storage.uri.startswith("s3://"):
            return f"storage.uri={self.job.storage.uri} is no object storage; a job on s3:// can lose it"
        outage.begin(seconds)
        self.members.tell({"type": "outage", "seconds": seconds})
        return ""

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
            await asyncio.get_running_loop().run_in_executor(None, self.run.folder.close)
        except StorageError as error:  # the job's end stands, whether storage takes the last lines or not
            logger.error("lines of the job's logs are lost: %s", error)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
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
            self._ending.end(State.FAILED, f"error in the coordinator: {type(error).__name__}: {error}")

    # -- hosts ---------------------------------------------------------------------------------------------------

    def _join(self, connection: Connection, message: Message) -> HostRecord:
        run, returning = self.run, self.state == State.RETURNING
        if (before := run.members.superseded(message)) is not None:
            before.silent = True
            before.connection.abort()
            self._lose(before)
        number = message.get("host") if returning else None
        host = run.members.join(connection, message, number)
        run.time.joined(host.number, back=number is not None and host.number == number)
        self._copies.joined(host.node)
        self._preemption.joined(host)
        connection.send({"type": "welcome", "job_folder": run.folder.store.uri, "host": host.number})
        if returning:
            self._coming_back.join(host, message)
        else:
            for image in message["images"]:
                run.inventory.add(image["generation"], image["rank"], image["step"], host.node, image["image"])
        if run.state.ended:
            connection.send({"type": "stop", "reason": run.state.value})
        return host

    def _lose(self, host: HostRecord) -> None:
        run = self.run
        if run.members.hosts.get(host.number) is not host:
            return  # it is here again, over another connection
        run.members.leave(host)
        run.checkpointer.host_lost(host)
        if run.state == State.RETURNING:
            self._coming_back.lose(host)
        if run.state.ended:
            return
        self._growth.host_lost()
        kind, how = "preemption", "has left its node"
        if not self._preemption.left(host):
            kind, how = ("host_silent", "is not heard any more") if host.silent else ("host_lost", "is gone")
            run.record(kind, host=host.number, node=host.node, pid=host.pid)
        if run.generation is not None and run.generation.has(host):
            heard = host.last_word(self.job.failure.lease_seconds)
            self._troubles.add(run.generation, Trouble(kind, f"{host.label} {how}", happened=heard))
        elif host.node not in run.members.by_node:
            self._finished_steps.do_without(host.node)
        run.time.left(host.number)

    def _handle(self, host: HostRecord, message: Message) -> None:
        run, kind = self.run, message["type"]
        if kind == "heartbeat":
            self._on_heartbeat(host, message)
        elif kind == "ready":
            run.members.is_ready(host)
            run.time.ready(host.number)
        elif kind == "uploaded":
            run.checkpointer.uploaded(host, message)
        elif kind == "preemption_notice":
            self.drain(host.node, message["deadline_seconds"], message["reason"])
        elif run.state == State.RETURNING:
            self._coming_back.hear(host, message)
        elif kind == "held":
            self._finished_steps.hold(
                message["generation"], message["rank"], message["step"], message["node"], message["image"]
            )
        elif kind == "story":  # of a host that was cut off, and what it belonged to is over
            host.connection.send({"type": "release"})
        elif kind in ("copy_failed", "copy_refused") and run.state == State.WAITING:
            self._leaving.copy_failed(message)
        elif run.generation is not None and message.get("generation") == run.generation.number:
            self._trainer_messages.handle(host, run.generation, message)
        # Everything else is the echo of a generation that is over.

    def _on_heartbeat(self, host: HostRecord, message: Message) -> None:
        pause = heartbeat_seconds(self.job.failure, len(self.members.hosts))
        host.connection.send({"type": "beat", "sent": message["sent"], "pause": pause})
        generation = self.generation
        if generation is None or message["generation"] != generation.number:
            return
        if message["beats"] != host.beats:
            generation.last_progress = host.beats_since = time.time()
        host.beats, host.started_step, host.process = message["beats"], message["started_step"], message["process"]

    def drain(self, node: str, deadline_seconds: float | None, reason: str) -> None:
        """``node`` ends in so many seconds (None: it is not known when): go on without its hosts, and let them end.

        Its images can be read while it is still there, so no finished step is lost, and with a step to be finished
        before a part of that time has passed none at all.
        """
        if not self.state.ended:
            self._leaving.notice(node, deadline_seconds, reason)

    # -- what no message tells -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Leases, hangs, hosts that have settled, nodes that get full or are taken away."""
        while not self.state.ended:
            if self.members.cut_silent(asyncio.get_running_loop().time(), self.job.failure.lease_seconds):
                self._troubles.stood_still()
            self._watch_hang()
            self._coming_back.look()
            self._directions.look()
            self._newcomers.look()
            if (generation := self.run.computing) is not None:
                self._copies.look(generation)
            self._leaving.look()
            self.run.account(after_seconds=_ACCOUNT_SECONDS)
            await asyncio.sleep(_WATCH_SECONDS)

    def _watch_hang(self) -> None:
        generation = self.run.computing
        if generation is None or generation.troubles:
            return
        if (trouble := hang(generation, time.time(), self.job.failure.hang_seconds)) is not None:
            self._troubles.add(generation, trouble)
