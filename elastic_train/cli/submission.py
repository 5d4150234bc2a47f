"""Sending a job to a Ray cluster through its job server."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.config.job import Job

EXCLUDES = [".git", ".venv", "runs", "outputs", "mlruns", "mlflow.db", "*.safetensors", "*.bin"]
"""What a working directory never needs to carry (patterns as in .gitignore)."""
STOP_WAIT_SECONDS = 60
"""Between SIGTERM and SIGKILL of `ray job stop`: time for a last checkpoint (Ray's default is 3)."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that a cluster has accepted."""

    id: str
    address: str

    def lines(self) -> list[str]:
        """What to do with it."""
        target = f"--address {self.address} {self.id}"
        return [
            f"submission: {self.id}",
            f"dashboard:  {self.address}/#/jobs/{self.id}",
            f"log:        ray job logs --follow {target}",
            f"stop:       ray job stop {target}",
        ]


def submit_job(job: Job, config: str, overrides: list[str], address: str) -> Submission:
    """Upload the current folder and start the job from it. Raises UserError when the cluster cannot take it."""
    here = Path.cwd()
    path = Path(config).resolve()
    if not path.is_relative_to(here):
        raise UserError(f"{config} is outside {here}, which is what the cluster gets; run from a folder that holds it")
    words = ["python", "-m", "elastic_train.cli.main", "train", "--config", str(path.relative_to(here))]
    words += [*overrides, "--address", "auto"]
    client = _client(address)
    try:
        identity = client.submit_job(
            entrypoint=shlex.join(words),
            submission_id=f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            runtime_env=runtime_environment(str(here)),
            metadata={"job": job.name},
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(_refusal(error, here)) from None
    return Submission(identity, address.rstrip("/"))


def runtime_environment(working_dir: str) -> dict[str, Any]:
    """Ray's runtime environment: the folder, what stays out of it, and how the job is stopped."""
    return {
        "working_dir": working_dir,
        "excludes": EXCLUDES,
        "env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGTERM", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)},
    }


def follow_submission(submission: Submission, write: Callable[[str], None]) -> bool:
    """Print the log until the job ends; whether it succeeded. Ctrl-C leaves the job running."""
    client = _client(submission.address)

    async def tail() -> None:
        async for text in client.tail_job_logs(submission.id):
            write(text.rstrip("\n"))

    try:
        asyncio.run(tail())
    except KeyboardInterrupt:
        write(f"the job goes on; stop it with: {submission.lines()[-1].split(maxsplit=1)[1]}")
        raise
    while not (status := client.get_job_status(submission.id)).is_terminal():
        time.sleep(1)
    write(f"{submission.id}: {status.value}")
    return bool(status.value == "SUCCEEDED")


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient

        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray job server at {address} ({reason}); start a cluster with `ray start --head` or give --address"
        ) from None


def _refusal(error: Exception, folder: Path) -> str:
    """Ray's reason in one line; for a folder that is too large also what is large in it."""
    reason = " ".join(str(error).split())
    if "exceeds the maximum size" not in reason:
        return f"the cluster refused the job: {reason}"
    sizes = {entry.name: _size(entry) for entry in folder.iterdir() if entry.name not in EXCLUDES}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{name} {sizes[name] / 2**20:,.0f} MiB" for name in largest)
    return (
        f"{folder} is too large to upload ({reason}); largest here: {listed}; left out already: {', '.join(EXCLUDES)}"
    )


def _size(entry: Path) -> int:
    if entry.is_dir() and not entry.is_symlink():
        return sum(file.lstat().st_size for file in entry.rglob("*") if file.is_file())
    return entry.lstat().st_size
