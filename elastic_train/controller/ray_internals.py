"""Everything we use of Ray Train that is not public API, in one place; ``test_ray_contract.py`` guards it.

Four things are bent. A worker group whose workers die stays RUNNING, so that the survivors' processes are untouched
(a ``WorkerGroupCallback`` that rewrites the poll status). The size of the group and the replacement of lost workers are
decided by our own ``ScalingPolicy``: replacements are plain actors that run the same host function, in the placement
group bundle of the lost worker while its node is there, so that Ray Train never restarts the group, not even when none
of its own workers is left. The controller actor's handle is handed out, so that a run can be aborted while it waits for
machines. And what Ray would print into the driver's terminal goes to the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray._private import worker as ray_worker
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
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
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_train.config.job import Job
from elastic_train.controller.current_run import State
from elastic_train.controller.ray_nodes import draining_nodes, free_seats
from elastic_train.controller.ray_queue import OtherJobs

logger = logging.getLogger(__name__)

JOB_ENDS = frozenset(state.value for state in State if state.ended)
"""What a host returns when the coordinator let it go at the job's end; every other return is a loss."""
_NOOP_PAUSE_SECONDS = 0.2
"""Ray Train's controller spins while the policy answers Noop for a group that is not running."""
_JOINER_PAUSE_SECONDS = 2.0
"""A host that dies at once is not started again faster than this."""
_LEAVE_SECONDS = 10.0
"""After the job's end: how long replacements may take to return before they are killed."""


@dataclass(slots=True, eq=False)
class Lost:
    """Return value in the status of a lost worker. The callback's own object, through which the policy answers it."""

    over: bool = False
    """the job has ended, as a replacement host saw"""


class ToleratesLostWorkers(WorkerGroupCallback):
    """Keeps the worker group RUNNING until its workers, or their replacements, return at the job's end."""

    def __init__(self) -> None:
        self._lost = Lost()

    def after_worker_group_poll_status(self, worker_group_status: WorkerGroupPollStatus) -> None:
        statuses = worker_group_status.worker_statuses
        for rank, status in statuses.items():
            if status.error is not None or not (status.running or status.return_value in JOB_ENDS):
                logger.debug("rank %d is lost and tolerated: %s", rank, status.error or status.return_value)
                statuses[rank] = WorkerStatus(running=False, return_value=self._lost)
        nobody = all(status.return_value is self._lost for status in statuses.values())
        ended = any(status.return_value in JOB_ENDS for status in statuses.values())
        if (nobody and not self._lost.over) or (ended and HostPolicy.replacements_are_leaving()):
            # A group in which nobody runs would be finished, and the replacements with it: killed.
            statuses[0] = WorkerStatus(running=True, return_value=self._lost)


@dataclass(frozen=True, slots=True)
class _Joiner:
    """A replacement host: its actor and the refs of the actor's two calls."""

    actor: Any
    started: Any
    ended: Any
    in_bundle: bool


class HostPolicy(ScalingPolicy):
    """As many hosts as there are seats between ``minimum`` and ``maximum``; what is lost is asked for again, for ever.

    The job's wish reaches the Ray autoscaler as what Ray cannot place: before the start a placement group of
    ``minimum`` seats, then one of the rest, and afterwards one actor for each seat that has no host. All of them belong
    to Ray Train's controller and so end with the job, however it ends. (Ray Train's own way, a request at the
    ``AutoscalingCoordinator``, would outlive a killed driver by three minutes.)

    Args:
        run_host: what a replacement actor runs (without arguments).
        on_controller: called in the controller actor with its handle.
        others: jobs that wait for their own minimum. Seats beyond ours are left to them.
    """

    _of_this_process: ClassVar[HostPolicy | None] = None
    """Ray Train's controller has a process of its own, and one policy"""

    def __init__(
        self,
        scaling_config: ScalingConfig,
        minimum: int,
        maximum: int,
        wait_seconds: float,
        run_host: Callable[[], str],
        on_controller: Callable[[Any], None],
        others: OtherJobs,
    ) -> None:
        super().__init__(scaling_config)
        self._minimum, self._maximum, self._wait_seconds = minimum, maximum, wait_seconds
        self._run_host, self._on_controller, self._others = run_host, on_controller, others
        self._joiners: dict[int, _Joiner] = {}
        """by seat; seats below the group's size are its bundles"""
        self._asked: dict[int, float] = {}
        self._over = False
        self._over_since: float | None = None
        self._first_look: float | None = None
        self._wishes: list[PlacementGroup] = []
        self._started_from = scaling_config
        """by which Ray Train makes its placement group; in its controller a copy of ours"""

    @property
    def _seat_resources(self) -> dict[str, float]:
        return dict(self.scaling_config._resources_per_worker_not_none)

    def after_controller_start(self, train_run_context: Any) -> None:
        """In place of the base class, whose request for resources is not ours to make."""
        HostPolicy._of_this_process = self
        self._started_from = train_run_context.scaling_config
        self._on_controller(ray.get_runtime_context().current_actor)

    def _get_num_workers_for_resource_request(self) -> int:
        return self._maximum

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        now = time.monotonic()
        self._first_look = self._first_look or now
        places = free_seats(self._seat_resources)
        free = places.total()
        sizes = [self._minimum, self._maximum - self._minimum]
        placed = [_is_placed(group) for group in self._wishes]
        for group, is_placed in zip(self._wishes, placed, strict=True):
            places.update(_nodes_of(group).values() if is_placed else ())
        needed = sum(self._others.waiting().values())
        seats, left = places.total(), places.total() - needed
        if left >= self._maximum or (seats >= self._minimum and now - self._first_look >= self._wait_seconds):
            # A group that is removed while Ray is placing it keeps its node's resources for ever.
            if all(is_placed or size > free for size, is_placed in zip(sizes, placed, strict=False)):
                self._first_look = None
                self._withdraw_wishes()
                return self._start_on(places, min(self._maximum, max(self._minimum, left)))
        elif all(placed) and not (placed and needed):
            self._wish(sizes[len(placed) :])
        time.sleep(_NOOP_PAUSE_SECONDS)
        return NoopDecision()

    def _start_on(self, places: Counter[str], count: int) -> ResizeDecision:
        """A group on so many of the seats, if there are as many, each bundle bound to its node.

        Ray's control plane tries without a pause to place the bundles of a lost node again, which occupies it for as
        long as the node is missing; a bundle that belongs to a node that is no more it leaves alone. What is lost with
        a node is replaced outside the group anyway.
        """
        seats = [node for node, free in places.most_common() for _ in range(free)][:count]
        self._started_from.label_selector = [{RAY_NODE_ID_KEY: node} for node in seats]
        return ResizeDecision(num_workers=len(seats), resources_per_worker=self._seat_resources)

    def _wish(self, sizes: list[int]) -> None:
        """Let the seats that the job needs, and once it has those the rest, wait to be placed.

        Each group is placed as a whole or not at all: two jobs that wait do not take each other's last seats.
        """
        if sizes and sizes[0]:
            self._wishes.append(placement_group([self._seat_resources] * sizes[0]))

    def _withdraw_wishes(self) -> None:
        for group in self._wishes:
            remove_placement_group(group)
        self._wishes = []

    def make_decision_for_running_worker_group(
        self, worker_group_state: WorkerGroupState, worker_group_status: WorkerGroupPollStatus
    ) -> ScalingDecision:
        statuses = worker_group_status.worker_statuses
        self._forget_ended()
        self._over = self._over or any(status.return_value in JOB_ENDS for status in statuses.values())
        lost = {rank: status.return_value for rank, status in statuses.items() if isinstance(status.return_value, Lost)}
        if self._over:
            leaving = self._let_go()
            for value in lost.values():
                value.over = not leaving
            return NoopDecision()
        group = worker_group_state.placement_group_handle.placement_group
        indices = (worker_group_state.workers[rank].placement_group_bundle_index for rank in lost)
        bundles = {index for index in indices if index is not None}  # Ray Train places every worker in a bundle
        gone = _on_nodes_that_leave(group, bundles) if bundles else set()
        for bundle in bundles - gone:
            self._ask(bundle, group)
        running = sum(status.running for status in statuses.values())
        for seat in self._ours([*gone, *range(len(statuses), self._maximum)], running):
            self._ask(seat, None)
        self._leave(gone)
        return NoopDecision()

    def _ours(self, seats: list[int], running: int) -> list[int]:
        """Those of the ``seats`` outside the group that are to be asked for.

        While another job lacks the hosts that it needs these are no more than we need ourselves, and what waits for the
        others is withdrawn: Ray gives a single actor every seat that comes, and a waiting job all of its seats or none.
        """
        placed = self._placed()
        open_seats = [seat for seat in seats if seat not in placed]
        others = self._others.waiting() if open_seats else {}
        short = max(0, self._minimum - running - len(placed)) if others else len(open_seats)
        self._others.leave_seats_to(list(others) if short < len(open_seats) else [])
        for seat in open_seats[short:]:
            if (joiner := self._joiners.pop(seat, None)) is not None:
                ray.kill(joiner.actor)
        return open_seats[:short]

    def _placed(self) -> set[int]:
        """Seats whose replacement host has got its place."""
        seats = {joiner.started: seat for seat, joiner in self._joiners.items()}
        done = ray.wait(list(seats), num_returns=len(seats), timeout=0)[0] if seats else []
        return {seats[ref] for ref in done}

    @classmethod
    def replacements_are_leaving(cls) -> bool:
        """The job is over; returns whether hosts outside the worker group are still about to return."""
        return cls._of_this_process is not None and cls._of_this_process._let_go()

    def _let_go(self) -> bool:
        """Hosts return by themselves, and clean up before that; those without a seat yet are not needed any more."""
        self._over, now = True, time.monotonic()
        self._over_since = self._over_since or now
        self._forget_ended()
        for seat, joiner in list(self._joiners.items()):
            if not _is_done(joiner.started):
                ray.kill(joiner.actor)
                del self._joiners[seat]
        return bool(self._joiners) and now - self._over_since < _LEAVE_SECONDS

    def _forget_ended(self) -> None:
        seats = {joiner.ended: seat for seat, joiner in self._joiners.items()}
        if not seats:
            return
        for ref in ray.wait(list(seats), num_returns=len(seats), timeout=0)[0]:
            del self._joiners[seats[ref]]
            try:
                self._over = self._over or ray.get(ref) in JOB_ENDS
            except ray.exceptions.RayError as error:
                logger.debug("the host on seat %d is lost: %s", seats[ref], error)

    def _ask(self, seat: int, group: Any | None) -> None:
        """Start (or keep asking for) a host on a seat that has none."""
        now = time.monotonic()
        if seat in self._joiners or now - self._asked.get(seat, -_JOINER_PAUSE_SECONDS) < _JOINER_PAUSE_SECONDS:
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
        started, ended = actor.started.remote(), actor.run.remote(self._run_host)
        self._joiners[seat] = _Joiner(actor, started, ended, group is not None)

    def _leave(self, gone: set[int]) -> None:
        """Ask elsewhere for what waits in a bundle whose node is lost or being drained: nothing starts there."""
        for seat in gone:
            if (joiner := self._joiners.get(seat)) is not None and joiner.in_bundle and not _is_done(joiner.started):
                self._ask_again(seat, None)

    def _ask_again(self, seat: int, group: Any | None) -> None:
        ray.kill(self._joiners.pop(seat).actor)
        self._asked.pop(seat, None)
        self._ask(seat, group)


def _is_placed(group: Any) -> bool:
    """Whether every bundle of the placement group is on a living node."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def _nodes_of(group: Any) -> dict[int, str]:
    """Bundle -> id of its node; "" when that is lost."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return nodes


def _on_nodes_that_leave(group: Any, bundles: set[int]) -> set[int]:
    """Those of the ``bundles`` whose node is lost, or will be taken away as Ray is told."""
    nodes, draining = _nodes_of(group), draining_nodes()
    return {bundle for bundle in bundles if not nodes[bundle] or nodes[bundle] in draining}


def _is_done(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


class _JoinerHost:
    """A host outside Ray Train's worker group."""

    def started(self) -> None:
        """Answers as soon as the actor has its seat."""

    def run(self, run_host: Callable[[], str]) -> str:
        return run_host()


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
    job: Job, run_host: Callable[[], str], *, on_controller: Callable[[Any], None], others: OtherJobs, folder: str
) -> HostTrainer:
    """The trainer whose ``fit()`` starts, places and keeps the hosts of ``job``; ``folder`` is for Ray Train."""
    cuda = job.hosts.device == "cuda"
    scaling = ScalingConfig(num_workers=job.hosts.max, resources_per_worker=job.hosts.seat, use_gpu=cuda)
    limits = job.hosts.min, job.hosts.max, job.hosts.start_wait_seconds
    policy = HostPolicy(scaling, *limits, run_host, on_controller, others)
    callbacks: list[Any] = [ToleratesLostWorkers()]
    failures = FailureConfig(max_failures=-1)  # ours to count: the coordinator ends a job that cannot go on
    return HostTrainer(
        run_host, policy, RunConfig(name=job.name, storage_path=folder, callbacks=callbacks, failure_config=failures)
    )


@contextmanager
def ray_messages_to_log() -> Iterator[None]:
    """Meanwhile, what Ray prints about its nodes ("... has been marked dead") is logged: the terminal shows the job."""

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            logger.info("%s: %s", data.get("pid"), line)

    printed = ray_worker.print_to_stdstream
    ray_worker.print_to_stdstream = log
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = printed
