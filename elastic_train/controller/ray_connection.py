"""The driver's connection to a Ray cluster, or the local one that is started for it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic_train.config.job import Job
from elastic_train.controller.stop_signals import StopSignals

logger = logging.getLogger(__name__)

_START_TRIES = 3

RAY_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Drained nodes are ours to handle: Ray Train's own answer restarts the whole group.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A call after the connection is closed is an error, and not the start of another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}


class JobError(Exception):
    """The job could not be started; one sentence says why."""


@contextmanager
def connected(job: Job, address: str | None, signals: StopSignals) -> Iterator[None]:
    """A connection to the cluster for the time of the run, with our signal handlers in the place of Ray's.

    Raises:
        JobError: there is no such cluster, it is of another Ray or Python, or a local one did not start.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    from elastic_train.controller.ray_versions import require_ray

    try:
        require_ray()
    except ImportError as error:
        raise JobError(str(error)) from error
    from elastic_train.controller.ray_actors import NAMESPACE

    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.WARNING}
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        options |= {"num_cpus": int(job.hosts.max * job.hosts.cpus) + 1, "include_dashboard": False}
    _connect(address, options)
    try:
        signals.install()
        yield
    finally:
        ray.shutdown()


def _connect(address: str | None, options: dict[str, Any]) -> None:
    """``ray.init``. A local cluster's start times out inside Ray now and then on a busy machine: it is tried again."""
    import ray

    for tries_left in reversed(range(_START_TRIES)):
        try:
            ray.init(address=address, **options)
            return
        except SystemExit:  # Ray's answer to a SIGTERM meanwhile; its exit code is not that of the signal
            raise SystemExit(128 + signal.SIGTERM) from None
        except (ConnectionError, ValueError) as error:
            raise JobError(f"no Ray cluster at {address!r}: {error}") from error
        except Exception as error:  # Ray has no type for it
            ray.shutdown()
            if "Version mismatch" in str(error):
                raise JobError(f"this is another Ray or Python than the cluster's: {_one_line(error)}") from error
            reason = str(error).strip().splitlines()[-1]
            if address is not None or not tries_left:
                raise JobError(f"Ray did not start: {reason}") from error
            logger.warning("Ray did not start and is started again: %s", reason)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def quiet() -> Iterator[None]:
    """What Ray prints goes to our log."""
    from elastic_train.controller.ray_internals import ray_messages_to_log

    with ray_messages_to_log():
        yield
