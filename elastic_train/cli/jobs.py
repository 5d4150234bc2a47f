"""Verbs about jobs: validate, train, status, stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.data_prepare import prepare_missing
from elastic_train.cli.guard import FAILED, UserError
from elastic_train.cli.huggingface import check_source
from elastic_train.cli.job_server import JobServer, is_server
from elastic_train.cli.options import Endpoint, JobRef, Region, StorageUri
from elastic_train.cli.submission import GRACE_SECONDS
from elastic_train.config.errors import ConfigError
from elastic_train.data.errors import DataError
from elastic_train.storage.errors import StorageError

if TYPE_CHECKING:
    from elastic_train.config.job import Job

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE]...", help="Job file (YAML), then overrides."),
]
Config = Annotated[str | None, typer.Option("--config", "-c", metavar="CONFIG", help="Job file (YAML).")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster to use; default: the one of RAY_ADDRESS, or a local one.")
]
Place = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Ray cluster (default: RAY_ADDRESS); or http:// of its dashboard, for a job that was submitted.",
    ),
]

LOG_LINES = 5
"""The end of a submission's log that is shown."""
END_SECONDS = 30.0
"""After its grace: until Ray has killed a submission and says so."""
VALIDATE_SECONDS = 5.0
"""``validate`` waits no longer for storage that does not answer: it is no mistake in the job file."""


def split_words(words: list[str] | None, config: str | None) -> tuple[str, list[str]]:
    """(job file, overrides) from the positional words and ``--config``."""
    rest = list(words or [])
    if config is None:
        if not rest or "=" in rest[0]:
            raise UserError("no job file: give its path first, e.g. jobs/configs/quickstart.yaml")
        config = rest.pop(0)
    stray = [word for word in rest if "=" not in word]
    if stray:
        raise UserError(f"{stray[0]!r} is not an override; write section.key=value, e.g. training.steps=200")
    return config, rest


def admit(words: list[str] | None, config: str | None) -> Job:
    """The job of a file and its overrides, checked as far as that goes without data. Raises ConfigError."""
    from elastic_train.planner.admission import admit_job

    job = admit_job(*split_words(words, config))
    for phase in job.data.phases:
        if phase.from_step > job.training.steps:
            reason = f"it begins after the last step, training.steps={job.training.steps}"
            typer.echo(
                f"warning: the phase of data.phases from step {phase.from_step} has no effect: {reason}", err=True
            )
    return job


def validate(words: Words = None, config: Config = None) -> None:
    """Check a job file and print the resolved job, its layouts and its batch arithmetic. Launches nothing."""
    job = admit(words, config)
    check_source(job)
    _print_resolved(job)


def _print_resolved(job: Job) -> None:
    """Raises ConfigError when the job cannot be trained on its data."""
    from elastic_train.cli.report import resolved

    not_checked = check_data(job)
    typer.echo(resolved(job), nl=False)
    if not_checked:
        typer.echo(f"# data not checked: {not_checked}")


def check_data(job: Job) -> str | None:
    """Raise ConfigError when the job cannot be trained on its data; returns why that cannot be told yet, if so."""
    from elastic_train.config.paths import anchored, home
    from elastic_train.data.sources import data_problems

    patience = min(VALIDATE_SECONDS, job.storage.retry_seconds)
    quick = job.model_copy(update={"storage": job.storage.model_copy(update={"retry_seconds": patience})})
    try:
        problems = data_problems(anchored(quick, home()))
    except (DataError, StorageError) as error:
        return str(error)
    if problems:
        raise ConfigError(problems)
    return None


def train(
    words: Words = None,
    config: Config = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    address: Address = None,
) -> None:
    """Run a job and follow it to its end. A job of the same name that was cut short is resumed."""
    job = admit(words, config)
    check_source(job)
    if dry_run:
        _print_resolved(job)
        return
    raise typer.Exit(follow(job, address))


def follow(job: Job, address: str | None) -> int:
    """Run ``job`` with live progress; returns the exit code. Relative paths start from ``config.paths.home()``."""
    from elastic_train.cli.live import LiveView, time_line
    from elastic_train.config.paths import anchored, home
    from elastic_train.controller.ray_connection import JobError
    from elastic_train.controller.run import run_job
    from elastic_train.data.sources import data_problems

    if address:
        _require_cluster(address)
    job = anchored(job, home())
    prepare_missing(job)
    problems = data_problems(job)
    if problems:
        raise ConfigError(problems)
    try:
        with LiveView(job.name) as view:
            outcome = run_job(job, address=address, on_status=view.update)
    except JobError as error:
        raise UserError(str(error)) from None
    if outcome.traceback:
        typer.echo(outcome.traceback, err=True)
    typer.echo(
        f"{job.name}: {outcome.state} at step {outcome.step}; {outcome.message}; job folder {outcome.job_folder}"
    )
    if outcome.time.get("host_seconds"):
        typer.echo(time_line(outcome.time))
    _tell_tracking(outcome.tracking)
    return outcome.exit_code


def _tell_tracking(tracking: Mapping[str, Any]) -> None:
    """Where the MLflow run is, and what it lacks: steps.jsonl in the job folder has every point."""
    if tracking.get("ui_command"):
        typer.echo(f"MLflow: {tracking['ui_command']}")
    for warning in tracking.get("warnings", ()):
        typer.echo(f"warning: MLflow: {warning}", err=True)
    if tracking.get("lost"):
        typer.echo(f"warning: {tracking['lost']} steps are not in MLflow; steps.jsonl has them all", err=True)


def status(
    job: JobRef,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
    address: Place = None,
) -> None:
    """Show how far a job is: by its coordinator if it runs, else by its job folder; of a submission by its log."""
    from elastic_train.cli.folder import describe_folder, job_name, open_folder
    from elastic_train.cli.live import status_lines

    if address is not None and is_server(address):
        _print_submission(JobServer(address), job_name(job))
        return
    live = _live_status(job_name(job), address)
    if live:
        lines: Iterable[str] = status_lines(job_name(job), live)
    else:
        lines = describe_folder(*open_folder(job, storage, endpoint_url, region))
    for line in lines:
        typer.echo(line)


def _require_cluster(address: str | None) -> None:
    from elastic_train.cli.reachable import cluster_problem

    problem = cluster_problem(address)
    if problem:
        raise UserError(problem)


def _live_status(name: str, address: str | None) -> dict[str, object] | None:
    from elastic_train.cli.reachable import cluster_problem

    problem = cluster_problem(address)
    if problem:
        if address:
            raise UserError(problem)
        return None

    from elastic_train.controller.client import job_status

    return job_status(name, address)


def _print_submission(server: JobServer, name: str) -> None:
    """A cluster whose job server is all that can be reached: Ray's state, and the end of the log."""
    found = server.newest(name)
    typer.echo(f"{name}: {found.state} as {found.id}")
    for line in server.log(found)[-LOG_LINES:]:
        typer.echo(f"  {line}")


def stop(
    job: JobRef,
    address: Place = None,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0, help="Wait at most so many seconds for the end (default: 60, or as the job was submitted)."
        ),
    ] = None,
) -> None:
    """Stop a running job after a last checkpoint, also one that waits for machines."""
    from elastic_train.cli.folder import job_name

    name = job_name(job)
    if address is not None and is_server(address):
        _stop_submission(JobServer(address), name, grace)
        return
    _require_cluster(address)

    from elastic_train.controller.client import stop_job

    if not stop_job(name, address, GRACE_SECONDS if grace is None else grace):
        raise UserError(f"no job named {name} is running there")
    typer.echo(f"{name}: stopped, or stopping after a last checkpoint")


def _stop_submission(server: JobServer, name: str, patience: float | None) -> None:
    """SIGTERM to the job's driver; what it then says last is what came of it."""
    found = server.require_running(name)
    server.stop(found)
    if found.grace is None:
        typer.echo(f"{found.id} was not sent by `elastic-train submit`: Ray kills it after the wait time that it has")
    else:
        typer.echo(f"{found.id}: SIGTERM for a last checkpoint; SIGKILL after {found.grace:g} s")
    grace = found.grace or GRACE_SECONDS
    ended = server.ended(found, grace + END_SECONDS if patience is None else patience)
    if not ended.ended:
        raise typer.Exit(_still_stopping(name))
    for line in server.log(ended)[-LOG_LINES:]:
        typer.echo(f"  {line}")
    typer.echo(f"{name}: {ended.state}")


def _still_stopping(name: str) -> int:
    typer.echo(f"{name}: still stopping", err=True)
    return FAILED
