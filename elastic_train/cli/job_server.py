"""The job server of a Ray cluster: what was submitted there, under which job's name, and how it is doing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic_train.cli.guard import UserError

JOB = "job"
"""Key of a submission's metadata: the name of the job."""
GRACE = "grace_seconds"
"""Key of a submission's metadata: between SIGTERM and SIGKILL."""
_POLL_SECONDS = 0.5


def is_server(address: str | None) -> bool:
    """Whether an address is that of a job server (the dashboard's), and not of the cluster itself."""
    return address is not None and address.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class Submission:
    """One run that the cluster has accepted. ``job`` is the name in the job file, or the id where there is none."""

    id: str
    job: str
    state: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED"""
    message: str
    started: int
    """milliseconds since the epoch"""
    grace: float | None
    """seconds between SIGTERM and SIGKILL; None when it was not sent by ``elastic-train submit``"""

    @property
    def ended(self) -> bool:
        return self.state in ("STOPPED", "SUCCEEDED", "FAILED")


class JobServer:
    """A connection to the job server at ``address``. Raises UserError when there is none, or another Ray."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            from ray.job_submission import JobSubmissionClient

            logging.getLogger("ray").setLevel(logging.WARNING)  # it tells of every request
            self._client: Any = JobSubmissionClient(self.address)
        except _errors() as error:
            raise UserError(
                f"no Ray job server at {address} ({_first_line(error)}); start a cluster with `ray start --head` or "
                "give --address"
            ) from None

    def require_same_ray(self) -> None:
        """Raises UserError when the cluster has another Ray: the folder's code is for the one that is here."""
        import ray

        theirs = self._client._server_ray_version
        if theirs != ray.__version__:
            raise UserError(
                f"the cluster at {self.address} runs Ray {theirs} and this is Ray {ray.__version__}; "
                "install the same version on both"
            )

    def submissions(self) -> list[Submission]:
        """All that the server knows of, the newest last."""
        with self._answers("list its jobs"):
            details = self._client.list_jobs()
        found = [_submission(detail) for detail in details if detail.submission_id]
        return sorted(found, key=lambda submission: submission.started)

    def running(self, name: str) -> Submission | None:
        """What runs, or waits to run, of the job ``name`` (or is the submission of that id)."""
        return next((found for found in self._named(name) if not found.ended), None)

    def newest(self, name: str) -> Submission:
        """The newest submission of the job ``name``. Raises UserError when there is none."""
        found = self._named(name)
        if not found:
            raise UserError(f"no job named {name} was submitted to {self.address}{self._others()}")
        return found[-1]

    def require_running(self, name: str) -> Submission:
        """As ``running``. Raises UserError when nothing runs."""
        found = self.running(name)
        if found is None:
            raise UserError(f"no job named {name} is running at {self.address}{self._others()}")
        return found

    def submit(self, **request: Any) -> str:
        """The id of the new submission. Raises RuntimeError or ValueError when the cluster cannot take it."""
        return str(self._client.submit_job(**request))

    def stop(self, submission: Submission) -> None:
        """Ask for SIGTERM, and SIGKILL after the submission's grace; returns at once."""
        with self._answers(f"stop {submission.id}"):
            self._client.stop_job(submission.id)

    def refreshed(self, submission: Submission) -> Submission:
        with self._answers(f"tell the state of {submission.id}"):
            return _submission(self._client.get_job_info(submission.id))

    def ended(self, submission: Submission, seconds: float = float("inf")) -> Submission:
        """The submission once it has ended, or as it is after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not (found := self.refreshed(submission)).ended and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def log(self, submission: Submission) -> list[str]:
        """The lines of the log so far."""
        with self._answers(f"show the log of {submission.id}"):
            return str(self._client.get_job_logs(submission.id)).splitlines()

    def follow(self, submission: Submission, write: Callable[[str], None]) -> None:
        """Write the log until the job has ended."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(submission.id):
                write(text.rstrip("\n"))

        with self._answers(f"show the log of {submission.id}"):
            asyncio.run(tail())

    def _named(self, name: str) -> list[Submission]:
        return [found for found in self.submissions() if name in (found.job, found.id)]

    def _others(self) -> str:
        names = sorted({found.job for found in self.submissions() if not found.ended})
        return f"; running there: {', '.join(names)}" if names else "; nothing is running there"

    @contextmanager
    def _answers(self, act: str) -> Iterator[None]:
        try:
            yield
        except _errors() as error:
            raise UserError(f"the job server at {self.address} cannot {act}: {_first_line(error)}") from None


def _errors() -> tuple[type[Exception], ...]:
    """What Ray raises, for a token that is wrong too, and the connection when there is no job server, or no longer."""
    from aiohttp import ClientError
    from ray.exceptions import RayError

    return RayError, ClientError, RuntimeError, OSError, ValueError


def _submission(detail: Any) -> Submission:
    metadata = detail.metadata or {}
    grace = metadata.get(GRACE)
    return Submission(
        id=detail.submission_id,
        job=metadata.get(JOB, detail.submission_id),
        state=str(getattr(detail.status, "value", detail.status)),
        message=detail.message or "",
        started=detail.start_time or 0,
        grace=float(grace) if grace else None,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
