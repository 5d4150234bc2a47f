"""Everything we use of Ray Train that is not public API, in one place; ``test_ray_contract.py`` guards it.

Three things are bent. A worker group whose workers die stays RUNNING, so that the survivors' processes are untouched
(a ``WorkerGroupCallback`` that rewrites the poll status). The size of the group and the replacement of lost workers are
decided by our own ``ScalingPolicy``: replacements are plain actors that run the same host function, in the placement
group bundle of the lost worker, so that Ray Train never restarts the group while one of its workers lives. And the
controller actor's handle is handed out, so that a run can be aborted while it waits for machines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupPollStatus, WorkerGroupState, WorkerStatus
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_train.config.job import Job

logger = logging.getLogger(__name__)

TESTED_RAY_VERSIONS = ("2.60.0",)
LOST = "lost"
"""Return value in the status of a worker that died and was tolerated."""
_NOOP_PAUSE_SECONDS = 0.2
"""Ray Train's controller spins while the policy answers Noop for a group that is not running."""
_JOINER_PAUSE_SECONDS = 2.0
"""A host that dies at once is not started again faster than this."""


class ToleratesLostWorkers(WorkerGroupCallback):
    """Keeps the worker group RUNNING as long as one of its workers lives or has ended well."""

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        statuses = worker_group_status.worker_statuses
        lost = {rank for rank, status in statuses.items() if status.error is not None}
        if len(lost) == len(statuses):
            return  # nobody is left: Ray Train's own restart is the way back
        for rank in lost:
            logger.debug("rank %d is lost and tolerated: %s", rank, statuses[rank].error)
            statuses[rank] = WorkerStatus(running=False, return_value=LOST)


class HostPolicy(ScalingPolicy):
    """As many hosts as there are seats between ``minimum`` and ``maximum``; what is lost is asked for again, for ever.

    Pending replacements are pending actors, which is also how the job's wish reaches the Ray autoscaler.

    Args:
        run_host: what a replacement actor runs (without arguments).
        on_controller: called in the controller actor with its handle.
    """

    def __init__(
        self,
        scaling_config: ScalingConfig,
        minimum: int,
        maximum: int,
        wait_seconds: float,
        run_host: Callable[[], str],
        on_controller: Callable[[Any], None],
    ) -> None:
        super().__init__(scaling_config)
        self._minimum, self._maximum, self._wait_seconds = minimum, maximum, wait_seconds
        self._run_host, self._on_controller = run_host, on_controller
        self._joiners: dict[int, Any] = {}
        """seat -> object ref of the running actor's only call. Seats below the group's size are its bundles."""
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, float] = {}
        self._first_look: float | None = None

    @property
    def _seat_resources(self) -> dict[str, float]:
        return dict(self.scaling_config._resources_per_worker_not_none)

    def after_controller_start(self, train_run_context: Any) -> None:
        self._on_controller(ray.get_runtime_context().current_actor)
        super().after_controller_start(train_run_context)

    def _get_num_workers_for_resource_request(self) -> int:
        return self._maximum

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        now = time.monotonic()
        self._first_look = self._first_look or now
        wanted = max(1, self._maximum - self._living_joiners())
        seats = count_seats(self._seat_resources)
        enough = max(1, self._minimum - self._living_joiners())
        if seats >= wanted or (seats >= enough and now - self._first_look >= self._wait_seconds):
            self._first_look = None
            return ResizeDecision(num_workers=min(seats, wanted), resources_per_worker=self._seat_resources)
        time.sleep(_NOOP_PAUSE_SECONDS)
        return NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        workers = worker_group_state.workers
        statuses = worker_group_status.worker_statuses
        if any(not status.running and status.return_value != LOST for status in statuses.values()):
            return NoopDecision()  # hosts are returning: the job is over
        for worker, status in zip(workers, statuses.values(), strict=True):
            if not status.running:
                bundle = worker.placement_group_bundle_index
                assert bundle is not None  # Ray Train places every worker in a bundle
                self._ask(bundle, worker_group_state.placement_group_handle.placement_group)
        for seat in range(len(workers), self._maximum):
            self._ask(seat, None)
        return NoopDecision()

    def _living_joiners(self) -> int:
        """Replacements that run or are pending; forgets those that ended."""
        ended = (
            set(ray.wait(list(self._joiners.values()), num_returns=len(self._joiners), timeout=0)[0])
            if self._joiners
            else set()
        )
        for seat in [seat for seat, ref in self._joiners.items() if ref in ended]:
            del self._joiners[seat], self._actors[seat]
        return len(self._joiners)

    def _ask(self, seat: int, group: Any | None) -> None:
        """Start (or keep asking for) a host on a seat that has none."""
        self._living_joiners()
        now = time.monotonic()
        if seat in self._joiners or now - self._asked.get(seat, 0.0) < _JOINER_PAUSE_SECONDS:
            return
        self._asked[seat] = now
        resources = self._seat_resources
        options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0)}
        options |= {"resources": resources, "max_restarts": 0}
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=seat
            )
        actor: Any = ray.remote(_JoinerHost).options(**options).remote()
        self._actors[seat] = actor
        self._joiners[seat] = actor.run.remote(self._run_host)


class _JoinerHost:
    """A host outside Ray Train's worker group."""

    def run(self, run_host: Callable[[], str]) -> str:
        return run_host()


def count_seats(seat: dict[str, float]) -> int:
    """How many hosts with resources ``seat`` the living nodes have free at this moment."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node().values()
    return sum(int(min(node.get(name, 0.0) // amount for name, amount in seat.items() if amount)) for node in free)


class HostTrainer(DataParallelTrainer):
    """Ray Train's trainer with a scaling policy of ours."""

    def __init__(self, run_host: Callable[[], str], policy: ScalingPolicy, run_config: RunConfig) -> None:
        super().__init__(
            lambda: run_host(),
            scaling_config=policy.scaling_config,
            run_config=run_config,  # type: ignore[arg-type]
        )
        self._policy = policy

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        controller_init_kwargs["scaling_policy"] = self._policy
        return super()._initialize_and_run_controller(**controller_init_kwargs)


def host_trainer(
    job: Job, run_host: Callable[[], str], *, on_controller: Callable[[Any], None], folder: str
) -> HostTrainer:
    """The trainer whose ``fit()`` starts, places and keeps the hosts of ``job``; ``folder`` is for Ray Train."""
    cuda = job.hosts.device == "cuda"
    seat = {"CPU": job.hosts.cpus} | ({"GPU": 1.0} if cuda else {})
    scaling = ScalingConfig(num_workers=job.hosts.max, resources_per_worker=seat, use_gpu=cuda)
    policy = HostPolicy(scaling, job.hosts.min, job.hosts.max, job.hosts.start_wait_seconds, run_host, on_controller)
    callbacks: list[Any] = [ToleratesLostWorkers()]
    failures = FailureConfig(max_failures=-1)  # ours to count: the coordinator ends a job that cannot go on
    return HostTrainer(
        run_host, policy, RunConfig(name=job.name, storage_path=folder, callbacks=callbacks, failure_config=failures)
    )
