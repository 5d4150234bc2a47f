"""Running a job from a driver process: Ray, coordinator, Ray Train's ``fit()``, signals, and a clean end."""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.paths import anchored, home
from elastic_train.controller.job_folder import job_uri
from elastic_train.controller.ray_connection import JobError, connected, quiet
from elastic_train.controller.stop_signals import StopSignals

logger = logging.getLogger(__name__)

Status = dict[str, Any]

_POLL_SECONDS = 0.2
_MOST_HOSTS = 100
"""The status that is asked for all the time lists no more: to list ten thousand keeps the coordinator busy."""
_LEAVE_SECONDS = 20.0
"""After the job's end: how long hosts may take to return before Ray Train's controller is ended."""
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    state: str
    """finished, failed or killed"""
    message: str
    step: int
    job_folder: str
    signal: int | None = None
    traceback: str | None = None
    tracking: dict[str, Any] = field(default_factory=dict)
    time: dict[str, Any] = field(default_factory=dict)
    """the run's time account (``TimeAccount.report``)"""

    @property
    def exit_code(self) -> int:
        """0 finished; 130/143 stopped by SIGINT/SIGTERM; 1 otherwise (a stop from outside is 143 as well)."""
        if self.state == "finished":
            return 0
        if self.state == "killed":
            return 128 + (self.signal or signal.SIGTERM)
        return 1


def run_job(job: Job, *, address: str | None = None, on_status: Callable[[Status], None] | None = None) -> Outcome:
    """Run ``job`` to its end on a Ray cluster and return how it ended.

    Args:
        address: of a running cluster ("auto" finds it); None: the cluster of ``RAY_ADDRESS``, else a local one is
            started for this run.
        on_status: called a few times per second with the job's status.

    Raises:
        JobError: the job cannot be started (name in use, other job in its folder, no storage, another Ray).
    """
    job = anchored(job, home())  # hosts and actors run in other folders than the driver
    with StopSignals() as signals, connected(job, address, signals), quiet():
        run = _Run(job, signals, on_status or (lambda status: None))
        try:
            return run.follow()
        finally:
            run.close()


class _CoordinatorLost(Exception):
    """The coordinator actor has died or does not answer."""


class _Run:
    """One run of one job: the coordinator actor, Ray Train's ``fit()`` in a thread, and the loop that watches both."""

    def __init__(self, job: Job, signals: StopSignals, on_status: Callable[[Status], None]) -> None:
        self._job, self._signals, self._on_status = job, signals, on_status
        self._token = secrets.token_hex(32)
        self._run_id = secrets.token_hex(4)
        self._folder = job_uri(job)
        self._step = 0
        self._fit_error: BaseException | None = None
        self._stop_sent = False
        self._end: tuple[str, str] | None = None
        """state and message of the job's end, once it was told"""
        self._controller: Any = None
        """Ray Train's controller actor; a coordinator that has come back does not know it"""
        self._closed = False
        self._coordinator = self._start_coordinator()
        self._ray_train_folder = tempfile.mkdtemp(prefix="elastic_train-ray-")

    def _start_coordinator(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from elastic_train.controller.ray_actors import NAMESPACE, CoordinatorActor, coordinator_name

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        name = coordinator_name(self._job.name)
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
        options["max_restarts"] = -1 if self._job.failure.coordinator_seconds else 0
        try:
            actor = ray.remote(CoordinatorActor).options(**options)
            return actor.remote(self._job.as_dict(), self._token, self._run_id)
        except ValueError as error:
            if "already" in str(error):
                raise JobError(
                    f"job {self._job.name!r} is already running on this cluster; stop it or use another name"
                ) from None
            raise

    def follow(self) -> Outcome:
        """Run the job to its end.

        Raises:
            JobError: the coordinator says that the job cannot be started.
        """
        try:
            return self._follow()
        except _CoordinatorLost as error:
            return Outcome("failed", str(error), self._step, self._folder)

    def _follow(self) -> Outcome:
        started = self._ask("start")
        if "problem" in started:
            raise JobError(started["problem"])
        status = self._status()
        if not _ended(status):
            fit = threading.Thread(
                target=self._fit, args=(tuple(started["address"]),), name="ray-train-fit", daemon=True
            )
            fit.start()
            while not _ended(status := self._status()) and fit.is_alive():
                self._on_status(status)
                self._pass_on_signal(status)
                self._controller = self._controller or self._ask("controller")
                time.sleep(_POLL_SECONDS)
            self._wait_for_hosts(fit)
        return self._outcome()

    def _status(self) -> Status:
        status: Status = self._ask("status", _MOST_HOSTS)
        self._step = status["step"]
        if _ended(status):
            self._end = status["state"], status["message"]
        return status

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The coordinator's answer to a call of ``method``; one that has died may come back meanwhile."""
        import ray

        deadline = time.monotonic() + self._job.failure.coordinator_seconds
        while True:
            try:
                return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=_START_SECONDS)
            except ray.exceptions.RayError as error:
                passing = isinstance(error, ray.exceptions.ActorUnavailableError | ray.exceptions.RayTaskError)
                if not passing or time.monotonic() >= deadline:
                    reason = str(error).strip().splitlines()[-1]
                    raise _CoordinatorLost(f"the coordinator does not answer ({method}): {reason}") from error
                logger.info("the coordinator has died and is started again")
                time.sleep(_POLL_SECONDS)

    def _pass_on_signal(self, status: Status) -> None:
        """Until the job is ending: a coordinator that dies with the request does not know of it when it is back."""
        if self._signals.received is not None and status["state"] != "finishing":
            self._stop_sent = True
            self._ask("stop", signal.Signals(self._signals.received).name)

    def _fit(self, address: tuple[str, int]) -> None:
        """Ray Train's part: starts, places and ranks the hosts, and keeps them until they return."""
        try:
            from elastic_train.controller.ray_actors import HostLauncher
            from elastic_train.controller.ray_internals import host_trainer
            from elastic_train.controller.ray_queue import OtherJobs

            run_host = HostLauncher(self._job.as_dict(), address, self._token, self._run_id)
            coordinator = self._coordinator
            host_trainer(
                self._job,
                run_host,
                on_controller=lambda controller: coordinator.register_controller.remote(controller),
                others=OtherJobs(self._job.name, lambda jobs: coordinator.note_seats_left.remote(jobs)),
                folder=self._ray_train_folder,
            ).fit()
        except BaseException as error:
            self._fit_error = error

    def _wait_for_hosts(self, fit: threading.Thread) -> None:
        """The hosts return by themselves; a group that is still waiting for machines is aborted."""
        import ray

        if self._fit_started():
            fit.join(timeout=_LEAVE_SECONDS)
            if fit.is_alive():
                logger.warning("Ray Train has not let its workers go after %.0f s; they are killed", _LEAVE_SECONDS)
            elif self._fit_error is not None:
                logger.warning("Ray Train ended with an error: %s", self._fit_error)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while fit.is_alive() and time.monotonic() < deadline:
            self._controller = self._controller or self._ask("controller")
            if self._controller is not None:  # else it is only just starting
                ray.kill(self._controller)
            fit.join(timeout=_POLL_SECONDS)

    def _fit_started(self) -> bool:
        return bool(self._status()["hosts"]) or self._fit_error is not None

    def _outcome(self) -> Outcome:
        status = self._ask("close")
        self._closed = True
        self._on_status(status)
        state, message = status["state"], status["message"]
        if not _ended(status) and self._end is not None:
            state, message = self._end  # of a coordinator that died after it
        elif not _ended(status):
            state, message = "failed", f"Ray Train ended before the job did: {self._fit_error or 'no error was given'}"
        received = self._signals.received if self._stop_sent else None
        told = {"traceback": status["traceback"], "tracking": status.get("tracking") or {}, "time": status["time"]}
        return Outcome(state, message, status["step"], self._folder, received, **told)

    def close(self) -> None:
        """Leave no actor, no folder and no shared memory of this run behind."""
        import ray

        from elastic_train.controller.pool import machine_wide, sweep

        try:
            if not self._closed:
                ray.get(self._coordinator.close.remote(), timeout=_LEAVE_SECONDS)
        except ray.exceptions.RayError:
            logger.warning("the coordinator was gone before it could close the job")
        ray.kill(self._coordinator)
        shutil.rmtree(self._ray_train_folder, ignore_errors=True)
        sweep(Path(self._job.snapshot.directory), ended=f"{machine_wide(self._job)}-{self._run_id}")


def _ended(status: Status) -> bool:
    return status["state"] in ("finished", "failed", "killed")
