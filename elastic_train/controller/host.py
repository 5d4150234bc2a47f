"""A host: the long-lived process that owns one seat. It forks trainers and moves their snapshots, it never computes.

It imports neither torch nor mlflow. What arrives over its connection to the coordinator is obeyed in order. When the
connection falls silent the host kills its trainer before the others go on without it (``lease``), and comes back as a
newcomer with its images. When it ends the coordinator has died: the trainer steps on as long as the others' hosts let
theirs, and the coordinator that comes back is told of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.byte_server import ByteServer
from elastic_train.checkpoint.image import Adoptable, adoptable, remove_older
from elastic_train.config.job import Job
from elastic_train.controller.coordinator_link import Address, CoordinatorLink
from elastic_train.controller.forkserver_client import BeginForkServer, ForkServerClient, TrainerProcess, begin_python
from elastic_train.controller.host_uploads import Uploads
from elastic_train.controller.lease import Lease
from elastic_train.controller.machine_facts import machine_facts
from elastic_train.controller.memory_limit import MemoryCgroup, MemoryWatch
from elastic_train.controller.network_interface import interface_of
from elastic_train.controller.partners import PartnerCopies
from elastic_train.controller.pool import Pool, machine_wide
from elastic_train.controller.process_control import process_state
from elastic_train.controller.snapshot_buffers import SnapshotBuffers
from elastic_train.controller.spot_notice import AWS_ENDPOINT, SpotNotice
from elastic_train.controller.story import Story
from elastic_train.controller.wire import Connection, Message
from elastic_train.storage import outage
from elastic_train.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host must know before it can join."""

    coordinator: tuple[str, int]
    token: str
    run_id: str
    node_id: str
    node_address: str
    job: dict[str, object]
    """The job as JSON values (``Job.as_dict``)."""


class Host:
    """One host of one job. ``run`` returns the reason of the end.

    Args:
        find_coordinator: where the coordinator is that has come back; asked in a thread. Default: where it was.
        begin_forkserver: how the process of its forkserver comes to be.
    """

    def __init__(
        self,
        settings: HostSettings,
        find_coordinator: Callable[[], Address | None] | None = None,
        begin_forkserver: BeginForkServer = begin_python,
    ) -> None:
        self._settings = settings
        self._job = Job.model_validate(settings.job, strict=False)
        self._pool = Pool(self._job.snapshot.directory, machine_wide(self._job), settings.run_id, settings.node_id)
        self._forkserver = ForkServerClient(self._job.hosts.threads, begin_forkserver)
        self._story = Story()
        self._uploads = Uploads(self._pool.path, self._open_store, self._tell, self._spawn)
        self._copies = PartnerCopies(self._pool.path, settings.token, self._story, self._tell_of_copy, self._spawn)
        self._trainer: TrainerProcess | None = None
        self._memory = MemoryWatch(MemoryCgroup.of_this_process())
        self._assignment: Message | None = None
        self._buffers = SnapshotBuffers(self._uploads.reads)
        self._ending = asyncio.Event()
        self._reason = ""
        self._tasks: set[asyncio.Task[None]] = set()
        patience = self._job.failure.coordinator_seconds
        self._link = CoordinatorLink(settings.coordinator, find_coordinator or (lambda: settings.coordinator), patience)
        self._coordinator: Connection | None = None
        self._heartbeat_seconds = self._job.failure.heartbeat_seconds
        """longer when the coordinator has very many hosts to answer"""
        self._gone_since: float | None = None
        """when the coordinator that had taken us was last there, while it is not (seconds of the loop's clock)"""
        self._notice: tuple[float, str] | None = None
        """when this machine will be taken away (same clock), and why"""
        self._number: int | None = None
        """as the coordinator calls this host"""
        self._ready_seconds: float | None = None
        """what the forkserver's imports took, once it is ready"""
        self._alone = False
        """Without a coordinator that knows the running generation: the ranks' hosts say what is finished."""
        self._job_folder = ""

    async def run(self) -> str:
        self._machine = await asyncio.to_thread(machine_facts, self._job.hosts.device)
        self._coordinator = await self._link.connect()  # without a job nothing is left in memory, not even when killed
        self._pool.enter()
        server = self._byte_server = ByteServer(self._settings.node_address, 0, self._settings.token, self._pool.path)
        server.start()
        try:
            await self._forkserver.start(self._on_trainer_message, self._on_trainer_end)
            self._lease = Lease(self._job.failure, asyncio.get_running_loop().time())
            self._join()
            self._spawn(self._serve())
            self._spawn(self._heartbeat())
            self._spawn(self._watch_forkserver())
            if (service := self._job.hosts.spot_notice) != "off":
                self._spawn(SpotNotice(AWS_ENDPOINT if service == "aws" else service).watch(self._tell_of_the_end))
            await self._ending.wait()
        finally:
            self._close(server)
        return self._reason

    def _close(self, server: ByteServer) -> None:
        for task in self._tasks:
            task.cancel()
        self._forkserver.close()
        self._copies.close()
        server.close()
        self._uploads.close()
        self._pool.leave()
        if self._coordinator:
            self._coordinator.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("host task failed", exc_info=task.exception())
            self._end(f"error in the host: {task.exception()}")

    def _end(self, reason: str) -> None:
        if not self._ending.is_set():
            self._reason = reason
            self._ending.set()

    def _tell(self, message: Message) -> None:
        assert self._coordinator is not None
        self._coordinator.send(message)

    def _open_store(self) -> Store:
        return Store.open(self._job_folder, self._job.storage)

    # -- coordinator ---------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Obey the coordinator, and after its death the one that comes back."""
        loop = asyncio.get_running_loop()
        while True:
            await self._obey()
            if self._ending.is_set():
                return
            connection = None
            if self._number is not None or self._lease_is_over():  # else it did not take us
                self._go_on_alone()
                self._gone_since = self._gone_since or loop.time()
                connection = await self._link.connect_again(self._gone_since)
            if connection is None:
                self._end("the coordinator is gone")
                return
            self._lease.answered(loop.time())
            self._coordinator = connection
            self._join()

    def _go_on_alone(self) -> None:
        assert self._coordinator is not None
        self._coordinator.close()
        if self._lease_is_over():  # the others may have gone on: only our images are of use
            self._do_release({})
            return
        self._alone = True
        self._lend()

    def _lend(self) -> None:
        """Let the trainer come to the agreement on the newest step that is whole as far as this host knows."""
        step = self._story.held_step
        if self._trainer is not None and not self._buffers.has_gone_on_from(step):
            self._trainer.control.lend(step, self._buffers.free(step))

    def _join(self) -> None:
        settings = self._settings
        self._tell(
            {
                "type": "join",
                "token": settings.token,
                "pid": os.getpid(),
                "node": settings.node_id,
                "address": settings.node_address,
                "bytes": list(self._byte_server.address),
                "pool": str(self._pool.path),
                "host": self._number,
                "machine": self._machine,
                "images": [_told(image) for image in adoptable(self._pool.path)],
            }
        )
        self._tell_notice()
        if self._alone:
            self._tell(self._story.as_message())
        if self._ready_seconds is not None:
            self._tell({"type": "ready", "preload_seconds": self._ready_seconds})

    async def _obey(self) -> None:
        assert self._coordinator is not None
        orders: dict[str, Callable[[Message], None]] = {
            "welcome": self._do_welcome,
            "beat": self._do_beat,
            "assign": self._do_assign,
            "release": self._do_release,
            "finished": self._do_finished,
            "discard": self._do_discard,
            "upload": self._do_upload,
            "copy": lambda message: self._copies.send([message["to"]], message),
            "partners": self._do_partners,
            "directions": self._do_directions,
            "adopted": self._do_adopted,
            "survey": self._do_survey,
            "tell_pool": lambda message: self._spawn(self._tell_pool()),
            "outage": lambda message: outage.begin(message["seconds"]),
        }
        while (message := await self._coordinator.receive()) is not None:
            if message["type"] == "stop":
                self._end(str(message["reason"]))
                return
            orders[message["type"]](message)

    def _lease_is_over(self) -> bool:
        return self._lease.left(asyncio.get_running_loop().time()) <= 0

    async def _heartbeat(self) -> None:
        """While there is a connection; without one it is nobody's lease that the trainer runs on."""
        loop = asyncio.get_running_loop()
        while True:
            assert self._coordinator is not None
            pause = self._heartbeat_seconds
            if not self._coordinator.closed:
                if self._lease_is_over():
                    self._give_up_lease()
                else:
                    self._beat(loop.time())
                    pause = min(pause, max(0.0, self._lease.left(loop.time())))
            await asyncio.sleep(pause)

    def _beat(self, now: float) -> None:
        trainer = self._trainer
        self._tell(
            {
                "type": "heartbeat",
                "sent": now,
                "generation": trainer.generation if trainer else 0,
                "started_step": trainer.control.started_step if trainer else 0,
                "beats": trainer.control.beats if trainer else 0,
                "process": process_state(trainer.pid) if trainer and trainer.pid else "",
            }
        )

    def _give_up_lease(self) -> None:
        """Nobody answers, or we stood still: the others go on without this host, or will in a moment."""
        assert self._coordinator is not None
        logger.warning("the lease ran out: no heartbeat was answered for %.1f s", self._lease.seconds)
        self._do_release({})
        self._coordinator.abort()  # it comes back as a newcomer

    async def _watch_forkserver(self) -> None:
        self._ready_seconds = await self._forkserver.wait_ready()
        self._tell({"type": "ready", "preload_seconds": self._ready_seconds})
        await self._forkserver.wait_closed()
        self._end("the forkserver ended")

    def _tell_of_the_end(self, seconds: float, reason: str) -> None:
        """This machine will be taken away."""
        self._notice = asyncio.get_running_loop().time() + seconds, reason
        self._tell_notice()

    def _tell_notice(self) -> None:
        """Also each coordinator that comes back: the one before has taken it to the grave."""
        if self._notice is not None:
            seconds = max(0.0, self._notice[0] - asyncio.get_running_loop().time())
            self._tell({"type": "preemption_notice", "deadline_seconds": seconds, "reason": self._notice[1]})

    def _do_welcome(self, message: Message) -> None:
        self._job_folder, self._number = message["job_folder"], message["host"]
        self._gone_since = None

    def _do_beat(self, message: Message) -> None:
        self._lease.answered(message["sent"])
        self._heartbeat_seconds = message["pause"]

    def _do_assign(self, message: Message) -> None:
        self._kill_trainer()
        self._alone = False
        self._story.begin(message)
        generation, rank = message["generation"], message["rank"]
        self._assignment = message
        self._buffers.begin(generation, rank)
        self._byte_server.fence(generation, set(message["restore"]["images"]))
        message["pool"] = str(self._pool.path)
        message["token"] = self._settings.token
        message["job"] = self._settings.job
        message["job_folder"] = self._job_folder
        message["outage_seconds"] = outage.seconds_left()
        message["interface"] = interface_of(self._settings.node_address)
        message["control"] = str(self._pool.path / f"g{generation}-r{rank}.control")
        self._memory.begin()
        self._trainer = self._forkserver.fork(generation, rank, message)

    def _do_directions(self, message: Message) -> None:
        if self._trainer is not None and message["generation"] == self._trainer.generation:
            self._trainer.tell(message)

    def _do_release(self, message: Message) -> None:
        """No place in the present layout, or nothing to run: wait as a warm spare."""
        self._kill_trainer()
        self._assignment, self._alone = None, False
        self._story.over()

    def _do_adopted(self, message: Message) -> None:
        """The coordinator that has come back knows all that was done without it: from now on it is its word again."""
        self._alone = False
        self._do_finished(message)

    def _do_survey(self, message: Message) -> None:
        """The coordinator that has come back forms a generation: whatever runs here must not change images any more."""
        trainer = self._trainer
        self._do_release(message)
        self._spawn(self._survey(trainer))

    async def _survey(self, trainer: TrainerProcess | None) -> None:
        if trainer is not None:
            await trainer.ended.wait()
        self._tell({"type": "surveyed"})

    async def _tell_pool(self) -> None:
        """What this node has, now that no trainer writes here."""
        found = await asyncio.to_thread(adoptable, self._pool.path)  # not behind the uploads
        descriptions = {(image.generation, image.rank): image.description for image in found}
        self._tell(
            {
                "type": "pool",
                "images": [_told(image) for image in found],
                "descriptions": [
                    {"generation": generation, "rank": rank, "description": description.to_json()}
                    for (generation, rank), description in descriptions.items()
                ],
            }
        )

    def _do_finished(self, message: Message) -> None:
        if self._trainer is None or message["generation"] != self._trainer.generation:
            return
        step = message["step"]
        self._story.finished(step, message["stored"])
        if not self._buffers.has_gone_on_from(step):
            self._trainer.control.allow(step, self._buffers.free(step))

    def _do_discard(self, message: Message) -> None:
        self._spawn(self._discard(message["before_generation"]))

    async def _discard(self, before_generation: int) -> None:
        """In a thread: the kernel takes seconds to free what a node holds. An upload keeps what it reads mapped."""
        await asyncio.to_thread(remove_older, self._pool.path, before_generation)

    def _do_partners(self, message: Message) -> None:
        if self._assignment is not None and message["generation"] == self._assignment["generation"]:
            self._assignment["partners"] = message["partners"]

    def _do_upload(self, message: Message) -> None:
        self._uploads.begin(message, trainer_runs=self._trainer is not None)

    # -- trainer -------------------------------------------------------------------------------------------------

    def _kill_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.control.close(unlink=True)
            self._trainer = None

    def _on_trainer_message(self, trainer: TrainerProcess, message: Message) -> None:
        if trainer is not self._trainer:
            return  # the last words of a generation that is over
        message |= {"generation": trainer.generation, "rank": trainer.rank}
        if message["type"] == "no_buffer":
            self._uploads.give_up(message["error"])
            newest = max(trainer.control.finished_step, trainer.control.held_step)
            trainer.control.allow(trainer.control.finished_step, self._buffers.free(newest))
        elif message["type"] == "stepped":
            assert self._assignment is not None
            self._buffers.written(message["step"], message["buffer"])
            partners = self._assignment["partners"]
            self._pass_on(message | {"copies": [partner["node"] for partner in partners]})
            self._copies.send(partners, message)
        else:
            self._pass_on(message)

    def _tell_of_copy(self, message: Message) -> None:
        self._tell(message)
        if self._alone:
            self._lend()

    def _pass_on(self, message: Message) -> None:
        """Tell the coordinator, now or when it is back."""
        self._story.told(message)
        self._tell(message)
        if self._alone:
            self._lend()

    def _on_trainer_end(self, trainer: TrainerProcess, code: int | None) -> None:
        if trainer is self._trainer:
            self._trainer = None
            trainer.control.close(unlink=True)
            name = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            told = {"generation": trainer.generation, "rank": trainer.rank, "cause": name}
            memory = self._memory.verdict() if name == "SIGKILL" else None
            self._pass_on({"type": "trainer_ended", **told, "out_of_memory": memory})


def _told(image: Adoptable) -> Message:
    """As the coordinator is told of it."""
    return {"generation": image.generation, "rank": image.rank, "step": image.step, "image": image.path.name}


def run_host(
    settings: HostSettings,
    find_coordinator: Callable[[], Address | None] | None = None,
    begin_forkserver: BeginForkServer = begin_python,
) -> str:
    """Run a host (see ``Host``) to its end in the calling thread; returns the reason it ended."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    return asyncio.run(_run(settings, find_coordinator, begin_forkserver))


async def _run(
    settings: HostSettings,
    find_coordinator: Callable[[], Address | None] | None,
    begin_forkserver: BeginForkServer,
) -> str:
    return await Host(settings, find_coordinator, begin_forkserver).run()
