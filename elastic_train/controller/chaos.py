"""Chaos against a running job: strikes at the times of a schedule and tells how the job takes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_train.config.faults import Fault, Kind
from elastic_train.controller.victims import Victim, choose

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 60.0
"""After the last fault: how long the job may take to step again."""

Told = dict[str, Any]
"""``{"told": "fault" | "missed" | "recovered" | "ended", ...}``"""


class NoSuchJob(Exception):
    """No job of that name is running on the cluster."""


class _CoordinatorGone(Exception):
    """The job's coordinator is dead, or has not answered for long."""


@dataclass(slots=True)
class _Watch:
    """What the job's events say, each told once."""

    since: float
    seen: set[tuple[float, str]] = field(default_factory=set)

    def recoveries(self, status: dict[str, Any]) -> Iterator[Told]:
        for event in status["last_events"]:
            key = (event["time"], event["event"])
            if event["time"] < self.since or key in self.seen:
                continue
            self.seen.add(key)
            if event["event"] == "generation_adopted":
                yield {"told": "adopted", "step": event["step"], "steps": event["steps"]}
            elif event["event"] == "generation_formed":
                yield {
                    "told": "recovered",
                    "cause": event["cause"],
                    "detail": event["detail"],
                    "layout": event["layout"],
                    "step": event["step"],
                    "seconds": event["recovery_seconds"],
                }


class Chaos:
    """Of one job.

    Args:
        coordinator: the job's actor.
        tell: called with what happens.
    """

    def __init__(self, coordinator: Any, tell: Callable[[Told], None]) -> None:
        from elastic_train.controller.saboteur import Saboteurs, nodes_that_must_live

        self._coordinator, self._tell = coordinator, tell
        self._saboteurs, self._spared = Saboteurs(), nodes_that_must_live()
        self._watch = _Watch(time.time())
        self._step = 0

    def run(self, faults: Sequence[Fault]) -> None:
        """Strike at each time; returns when the job has ended, or has recovered from the last one."""
        try:
            self._run(faults)
        except _CoordinatorGone:
            self._tell({"told": "ended", "state": "gone", "step": self._step})

    def _run(self, faults: Sequence[Fault]) -> None:
        begun = time.monotonic()
        for host in self._status()["hosts"]:
            self._saboteurs.prepare(host["node"])
        for number, fault in enumerate(faults):
            following = faults[number + 1].at if number + 1 < len(faults) else fault.at + _PATIENCE_SECONDS
            if not self._wait(begun + fault.at) or not self._strike(fault, begun, begun + following):
                return
        self._settle()

    def close(self) -> None:
        self._saboteurs.close()

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._ask("status")
        self._step = status["step"]
        for told in self._watch.recoveries(status):
            self._tell(told)
        return status

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The answer to a call of ``method``, as soon as there is a coordinator that gives one."""
        import ray

        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=_PATIENCE_SECONDS)
            except ray.exceptions.ActorDiedError as error:
                raise _CoordinatorGone from error
            except (
                ray.exceptions.RayActorError,
                ray.exceptions.RayTaskError,
                ray.exceptions.GetTimeoutError,
            ) as error:
                if time.monotonic() > deadline:
                    raise _CoordinatorGone from error
                time.sleep(_POLL_SECONDS)

    def _wait(self, until: float) -> bool:
        """Watch the job until then; False once it has ended."""
        while not _ended(status := self._status()):
            if time.monotonic() >= until:
                return True
            time.sleep(min(_POLL_SECONDS, max(0.0, until - time.monotonic())))
        self._tell({"told": "ended", "state": status["state"], "step": status["step"]})
        return False

    def _strike(self, fault: Fault, begun: float, until: float) -> bool:
        """As soon as there is a victim, at the latest ``until``; False once the job has ended."""
        while True:
            status = self._status()
            if _ended(status):
                return self._wait(until)
            victim = self._victim(fault, status)
            if time.monotonic() >= until or (victim is not None and self._saboteurs.finds(fault, victim)):
                break
            time.sleep(_POLL_SECONDS)
        at = time.monotonic() - begun
        problem = "there was no victim" if victim is None else self._do(fault, victim)
        told: Told = {
            "at": at,
            "kind": fault.kind.value,
            "victim": victim.label if victim else "",
            "step": status["step"],
        }
        if problem:
            self._tell({"told": "missed", "reason": problem, **told})
        else:
            self._tell({"told": "fault", **told})
        return True

    def _victim(self, fault: Fault, status: dict[str, Any]) -> Victim | None:
        if fault.kind in (Kind.KILL_COORDINATOR, Kind.STORE_OUTAGE):
            place = self._ask("place")
            label = "coordinator" if fault.kind == Kind.KILL_COORDINATOR else "object storage"
            return Victim(place["node"], "", place["pid"], None, label)
        return choose(fault, status["hosts"], self._spared)

    def _do(self, fault: Fault, victim: Victim) -> str:
        self._ask("note_chaos", {"kind": fault.kind.value, "victim": victim.label, "seconds": fault.seconds})
        if fault.kind == Kind.STORE_OUTAGE:
            return str(self._ask("begin_outage", fault.seconds))
        return self._saboteurs.strike(fault, victim)

    def _settle(self) -> None:
        """Until the job steps again after the last fault."""
        deadline, step = time.monotonic() + _PATIENCE_SECONDS, None
        while time.monotonic() < deadline:
            status = self._status()
            if _ended(status):
                self._wait(deadline)
                return
            if status["state"] == "running":
                step = step if step is not None else status["step"]
                if status["step"] > step + 1:
                    return
            time.sleep(_POLL_SECONDS)


def _ended(status: dict[str, Any]) -> bool:
    return status["state"] in ("finished", "failed", "killed")


def run_chaos(name: str, faults: Sequence[Fault], address: str | None, tell: Callable[[Told], None]) -> None:
    """Strike the running job ``name`` of the cluster at ``address`` (None: the one of RAY_ADDRESS, or found).

    Raises NoSuchJob.
    """
    from elastic_train.controller.client import coordinator_of
    from elastic_train.controller.ray_internals import ray_messages_to_log

    with ray_messages_to_log(), coordinator_of(name, address) as coordinator:
        if coordinator is None:
            raise NoSuchJob(f"no job named {name} is running there")
        chaos = Chaos(coordinator, tell)
        try:
            chaos.run(faults)
        finally:
            chaos.close()
