"""Asking and stopping a running job from another process on the cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    import ray

    with coordinator_of(name, address) as actor:
        return None if actor is None else dict(ray.get(actor.status.remote(), timeout=10.0))


def stop_job(name: str, address: str | None = None, grace: float = 60.0) -> bool:
    """Ask a running job to checkpoint and end, and wait up to ``grace`` seconds; False when it is not running."""
    import ray

    with coordinator_of(name, address) as actor:
        if actor is None:
            return False
        ray.get(actor.stop.remote("stop_job"), timeout=10.0)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            try:
                if ray.get(actor.status.remote(), timeout=10.0)["state"] in ("finished", "failed", "killed"):
                    break
            except ray.exceptions.RayActorError:
                break  # it has ended and is gone
            time.sleep(0.2)
        return True
