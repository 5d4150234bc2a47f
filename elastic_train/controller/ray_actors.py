"""The coordinator as a Ray actor, and what a Ray process needs to become a host."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Any

import ray

from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.coordinator_link import Address
from elastic_train.controller.current_run import State
from elastic_train.controller.drain_watch import DrainWatch
from elastic_train.controller.host import HostSettings, run_host
from elastic_train.controller.job_folder import JobMismatch
from elastic_train.controller.ray_nodes import draining_nodes
from elastic_train.controller.status import status_of
from elastic_train.controller.tracking_feed import TrackingFeed
from elastic_train.data.errors import DataError
from elastic_train.storage.errors import StorageError

NAMESPACE = "elastic_train"
_FIND_SECONDS = 10.0

logger = logging.getLogger(__name__)


def coordinator_name(job_name: str) -> str:
    return f"coordinator/{job_name}"


class CoordinatorActor:
    """Runs one job's coordinator in the actor's event loop. Every method returns JSON-like values.

    Ray starts the actor again when its process has died. Whoever then asks it something first, a host that looks for it
    or the driver, makes it start the coordinator, which finds in the journal that ``run_id`` has begun already.
    """

    def __init__(self, job: dict[str, Any], token: str, run_id: str) -> None:
        self._job = Job.model_validate(job, strict=False)
        self._token, self._run_id = token, run_id
        self._started: asyncio.Future[dict[str, Any]] | None = None
        self._controller: Any = None
        self._events: list[dict[str, Any]] = []
        self._coordinator: Coordinator | None = None
        self._tracking = TrackingFeed(self._job)

    async def start(self) -> dict[str, Any]:
        """Open the job and listen: ``{"address": [ip, port]}``, or ``{"problem": sentence}`` if that cannot be."""
        if self._started is None or (self._started.done() and "problem" in self._started.result()):
            self._started = asyncio.ensure_future(self._start())
        return await self._started

    async def _start(self) -> dict[str, Any]:
        try:
            here = ray.util.get_node_ip_address()
            self._coordinator = Coordinator(self._job, here, self._token, self._on_event, self._run_id)
            self._coordinator.on_opened = self._tracking.start
            address = await self._coordinator.start()
            self._coordinator.spawn(DrainWatch(draining_nodes, self._coordinator.drain).watch())
        except (ConfigError, JobMismatch, StorageError, DataError, CheckpointError) as error:
            if self._coordinator is not None:
                await self._coordinator.close()
                self._coordinator = None
            return {"problem": str(error)}
        return {"address": list(address)}

    async def _running(self) -> Coordinator:
        problem = (await self.start()).get("problem")
        if problem is not None or self._coordinator is None:
            raise RuntimeError(f"the coordinator did not start: {problem}")
        return self._coordinator

    async def address(self) -> list[Any]:
        """Where hosts find the coordinator: [ip, port]."""
        await self._running()
        return list((await self.start())["address"])

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] != "step":
            self._events = [*self._events[-49:], event]
        self._tracking.on_event(event)

    async def pid(self) -> int:
        return os.getpid()

    async def place(self) -> dict[str, Any]:
        """Where this actor is: ``{"pid": ..., "node": ...}``."""
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    async def note_chaos(self, note: dict[str, Any]) -> None:
        """Write into the ledger what somebody is about to break."""
        await (await self._running()).note_chaos(note)

    async def begin_outage(self, seconds: float) -> str:
        """Let coordinator, hosts and the trainers to come be without object storage; a sentence if there is none."""
        return (await self._running()).begin_outage(seconds)

    async def lacks(self) -> dict[str, Any] | None:
        """What the job needs before it can train; None when it has that, or has ended. Other jobs ask it.

        ``{"seat": what a host needs, "hosts": hosts.min, "missing": how many of them have not joined}``.
        """
        if self._coordinator is None:  # which is not started by those who ask this
            return None
        run, hosts = self._coordinator.run, self._job.hosts
        missing = hosts.min - len(run.members.hosts)
        waits = run.state in (State.STARTING, State.WAITING) and missing > 0
        return {"seat": hosts.seat, "hosts": hosts.min, "missing": missing} if waits else None

    async def note_seats_left(self, jobs: list[str]) -> None:
        """Write into the ledger to which jobs this one leaves the next seats; none: it takes them again."""
        (await self._running()).run.record("seats_left", jobs=jobs)

    async def register_controller(self, controller: Any) -> None:
        """Ray Train's controller actor, told by the scaling policy when it starts."""
        self._controller = controller

    async def controller(self) -> Any:
        return self._controller

    async def status(self, most_hosts: int | None = None) -> dict[str, Any]:
        status = status_of(await self._running(), self._events, most_hosts)
        return {**status, "tracking": self._tracking.status()}

    async def stop(self, reason: str) -> None:
        (await self._running()).stop(reason)

    async def close(self) -> dict[str, Any]:
        """Release everything; returns the last status, {} when the job never started."""
        if self._coordinator is None and self._started is not None:
            await self._tracking.close("failed")
            return {}
        status = await self.status()
        status["tracking"] = await self._tracking.close(status["state"])
        await (await self._running()).close()
        return status


class HostLauncher:
    """Makes the calling Ray process a host; returns the reason of its end. Small, as it travels to every worker."""

    def __init__(self, job: dict[str, Any], address: tuple[str, int], token: str, run_id: str) -> None:
        self._job, self._address, self._token, self._run_id = job, address, token, run_id

    def __call__(self) -> str:
        return run_host(
            HostSettings(
                coordinator=self._address,
                token=self._token,
                run_id=self._run_id,
                node_id=ray.get_runtime_context().get_node_id(),
                node_address=ray.util.get_node_ip_address(),
                job=self._job,
            ),
            partial(find_coordinator, str(self._job["name"])),
        )


def find_coordinator(job_name: str) -> Address | None:
    """Where the job's coordinator listens; None when it is not there, or not yet again."""
    try:
        actor: Any = ray.get_actor(coordinator_name(job_name), namespace=NAMESPACE)
        address: list[Any] = ray.get(actor.address.remote(), timeout=_FIND_SECONDS)
    except (ValueError, ray.exceptions.RayError):
        return None
    return str(address[0]), int(address[1])
