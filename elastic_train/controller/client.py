"""Asking and stopping a running job from another process on the cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ANSWER_SECONDS = 10.0
_AWAY_SECONDS = 30.0
"""A coordinator that has died is back sooner."""


@contextmanager
def coordinator_of(name: str, address: str | None) -> Iterator[Any | None]:
    """The job's coordinator actor, None when no cluster or no such job is running."""
    import ray

    from elastic_train.controller.ray_actors import NAMESPACE, coordinator_name

    try:
        ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        yield None
        return
    try:
        try:
            actor = ray.get_actor(coordinator_name(name), namespace=NAMESPACE)
        except ValueError:
            actor = None
        yield actor
    finally:
        ray.shutdown()


def job_status(name: str, address: str | None = None) -> dict[str, Any] | None:
    """The status of a running job, None when it is not running (its job folder tells the rest)."""

    with coordinator_of(name, address) as actor:
        return None if actor is None else dict(_ask(actor.status))


def stop_job(name: str, address: str | None = None, grace: float = 60.0) -> bool:
    """Ask a running job to checkpoint and end, and wait up to ``grace`` seconds; False when it is not running."""
    import ray

    with coordinator_of(name, address) as actor:
        if actor is None:
            return False
        try:
            _ask(actor.stop, "stop_job")
        except ray.exceptions.ActorDiedError:
            return False  # it had ended before
        _await_end(actor, grace)
        return True


def _await_end(actor: Any, grace: float) -> None:
    """Return when the job has ended, at the latest after ``grace`` seconds; its driver then ends the actor."""
    import ray

    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        try:
            if _ask(actor.status)["state"] in ("finished", "failed", "killed"):
                return
        except ray.exceptions.ActorDiedError:
            return
        time.sleep(0.2)


def _ask(method: Any, *arguments: Any) -> Any:
    """The coordinator's answer; one that has died is waited for while Ray starts it again."""
    import ray

    deadline = time.monotonic() + _AWAY_SECONDS
    while True:
        try:
            return ray.get(method.remote(*arguments), timeout=_ANSWER_SECONDS)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.RayTaskError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.2)
