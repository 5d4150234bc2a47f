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
    here = Path.cwd()
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
            runtime_env=runtime_environment(str(here), grace),
            metadata={JOB: name, GRACE: str(grace), "config": config},
            **needs,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(_refusal(error, here)) from None


def path_below_here(config: str) -> str:
    """``config`` relative to the current folder, which is what the cluster gets. Raises UserError outside of it."""
    here = Path.cwd()
    path = Path(config).resolve()
    if not path.is_relative_to(here):
        raise UserError(f"{config} is outside {here}, which is what the cluster gets; run from a folder that holds it")
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


def _refusal(error: Exception, folder: Path) -> str:
    """Ray's reason in one line; for a folder that is too large also what is large in it."""
    reason = " ".join(str(error).split())
    if "exceeds the maximum size" not in reason:
        return f"the cluster refused the job: {reason}"
    sizes = {entry.name: _size(entry) for entry in folder.iterdir() if entry.name not in EXCLUDES}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{name} {sizes[name] / 2**20:,.0f} MiB" for name in largest)
    return (
        f"{folder} is too large to upload ({reason}); largest here: {listed}; left out already: {', '.join(EXCLUDES)}; "
        "name more in .rayignore"
    )


def _size(entry: Path) -> int:
    if entry.is_dir() and not entry.is_symlink():
        return sum(file.lstat().st_size for file in entry.rglob("*") if file.is_file())
    return entry.lstat().st_size
