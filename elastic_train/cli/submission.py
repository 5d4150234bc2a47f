"""Sending a job to a Ray cluster through its job server: the folder, the command, and how it will be stopped."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.cli.guard import UserError
from elastic_train.cli.job_server import GRACE, JOB, JobServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_train.config.job import Job

EXCLUDES = [".git", ".venv", "runs", "outputs", "exports", "mlruns", "mlflow.db", "*.safetensors", "*.bin"]
"""What a working directory never needs to carry (patterns as in .gitignore)."""
GRACE_SECONDS = 60
"""Between SIGTERM and SIGKILL of a stop, if not said otherwise: time for a last checkpoint (Ray's default is 3)."""


def submit_command(server: JobServer, name: str, config: str, command: list[str], grace: int, **needs: float) -> str:
    """Upload the current folder and run the words ``command`` in it; returns the submission's id.

    ``config`` is the file that the command reads. ``needs``: ``entrypoint_num_cpus`` and ``entrypoint_num_gpus`` of the
    command's own process. Raises UserError when the cluster cannot take it, or a job of that name runs there.
    """
    server.require_same_ray()
    if (other := server.running(name)) is not None:
        raise UserError(
            f"job {name!r} is running on this cluster already, as {other.id}; stop it with "
            f"`{_verb('stop', name, server)}`, or use another name"
        )
    try:
        return server.submit(
            entrypoint=shlex.join(command),
            submission_id=f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            runtime_env=runtime_environment(str(Path.cwd()), grace),
            metadata={JOB: name, GRACE: str(grace), "config": config},
            **needs,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"the cluster refused the job: {' '.join(str(error).split())}") from None


def path_below_here(config: str) -> str:
    """``config`` relative to the current folder, which is what the cluster gets.

    Raises UserError when it is not in there, or the folder is too large to send.
    """
    from elastic_train.controller.working_tree import TreeTooLarge, check_size

    here = Path.cwd()
    path = Path(config).resolve()
    if not path.is_relative_to(here):
        raise UserError(f"{config} is outside {here}, which is what the cluster gets; run from a folder that holds it")
    try:
        check_size(here, EXCLUDES)
    except TreeTooLarge as error:
        raise UserError(str(error)) from None
    return str(path.relative_to(here))


def runtime_environment(working_dir: str, grace: int = GRACE_SECONDS) -> dict[str, Any]:
    """Ray's runtime environment: the folder, what stays out of it, and how the job is stopped."""
    return {
        "working_dir": working_dir,
        "excludes": EXCLUDES,
        "env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGTERM", "RAY_JOB_STOP_WAIT_TIME_S": str(grace)},
    }


def what_to_do(server: JobServer, identity: str, name: str) -> Iterator[str]:
    """Where a submission is to be seen, and how it is stopped: lines of ``label: value``."""
    yield f"submission: {identity}"
    yield f"dashboard:  {server.address}/#/jobs/{identity}"
    yield f"log:        {_verb('logs', name, server)} --follow"
    yield f"stop:       {_verb('stop', name, server)}"


def places(job: Job) -> Iterator[str]:
    """Where the job's folder and its MLflow run will be, for people who are not on the cluster."""
    relative = "://" not in job.storage.uri and not Path(job.storage.uri).is_absolute()
    folder = f"{'~/elastic_train/' if relative else ''}{job.storage.uri.rstrip('/')}/{job.name}"
    on_disk = "://" not in job.storage.uri
    yield f"job folder: {folder}" + (" on the cluster's machines, which must share it" if on_disk else "")
    yield f"MLflow:     {_mlflow(job, folder.rpartition('/')[0], on_disk)}"


def _mlflow(job: Job, folder: str, on_disk: bool) -> str:
    """The job file's address, else that of this machine's environment, else the file beside the job folders."""
    if not job.tracking.enabled:
        return "off (tracking.enabled)"
    if job.tracking.uri is not None:
        return job.tracking.uri
    if on_disk:
        return f"MLFLOW_TRACKING_URI of the cluster, else {folder}/mlflow.db on its head"
    return "MLFLOW_TRACKING_URI of the cluster; without it nothing is tracked (tracking.uri)"


def _verb(verb: str, name: str, server: JobServer) -> str:
    return f"elastic-train {verb} {name} --address {server.address}"
