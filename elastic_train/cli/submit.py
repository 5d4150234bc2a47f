"""Verbs that take a job file or a task file: run, submit; and the log of what was submitted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.guard import FAILED, INTERRUPTED, OK
from elastic_train.cli.huggingface import check_source
from elastic_train.cli.job_server import JobServer, Submission
from elastic_train.cli.jobs import Address, Config, Words, admit, follow, split_words
from elastic_train.cli.options import JobRef
from elastic_train.cli.submission import GRACE_SECONDS, path_below_here, places, submit_command, what_to_do

if TYPE_CHECKING:
    from elastic_train.config.job import Job

Server = Annotated[
    str, typer.Option("--address", envvar="RAY_API_SERVER_ADDRESS", help="Dashboard address of the cluster.")
]
SERVER = "http://127.0.0.1:8265"


def run(context: typer.Context, words: Words = None, config: Config = None, address: Address = None) -> None:
    """Do what a file says: train a job, or prepare data, evaluate or export as a task file asks.

    Relative paths start from $ELASTIC_TRAIN_HOME, or from ~/elastic_train in a folder that Ray has unpacked.
    """
    from elastic_train.cli.task_file import prepared, read_task
    from elastic_train.config.paths import home

    path, overrides = split_words(words, config)
    task = read_task(path, overrides)
    if task is None:
        job = admit(words, config)
        check_source(job)
        raise typer.Exit(follow(job, address))
    verb = prepared(task, context)
    home().mkdir(parents=True, exist_ok=True)
    os.chdir(home())
    with verb:
        verb.command.invoke(verb)


def submit(
    context: typer.Context,
    words: Words = None,
    config: Config = None,
    address: Server = SERVER,
    grace: Annotated[
        int, typer.Option(min=1, help="Seconds between SIGTERM and SIGKILL of a stop, for a last checkpoint.")
    ] = GRACE_SECONDS,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the log; exit with the job's result.")] = False,
) -> None:
    """Send a job, or the task of a task file, and this folder to a Ray cluster (`ray job submit`).

    A job whose name has a job folder already goes on from its newest checkpoint.
    """
    from elastic_train.cli.task_file import Task, prepared, read_task

    path, overrides = split_words(words, config)
    task = read_task(path, overrides)
    todo: Task | Job = admit(words, config) if task is None else task
    needs: dict[str, float] = {}
    if task is not None:
        prepared(task, context)
        needs = {f"entrypoint_num_{key}": value for key, value in task.needs.items()}
    below = path_below_here(path)
    command = ["python", "-m", "elastic_train.cli.main", "run", "--config", below, *overrides, "--address", "auto"]
    server = JobServer(address)
    identity = submit_command(server, todo.name, below, command, grace, **needs)
    for line in what_to_do(server, identity, todo.name):
        typer.echo(line)
    for line in () if isinstance(todo, Task) else places(todo):
        typer.echo(line)
    if wait:
        raise typer.Exit(_follow(server, server.newest(identity), todo.name))


def logs(
    job: JobRef,
    address: Server = SERVER,
    follow_it: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the job ends; exit with its result.")
    ] = False,
) -> None:
    """Print the log of the newest submission of a job."""
    from elastic_train.cli.folder import job_name

    server = JobServer(address)
    if follow_it:
        raise typer.Exit(_follow(server, server.newest(job_name(job)), job_name(job)))
    for line in server.log(server.newest(job_name(job))):
        typer.echo(line)


def _follow(server: JobServer, submission: Submission, name: str) -> int:
    """Print the log until the job ends; the exit code of its result. Ctrl-C leaves the job running."""
    try:
        server.follow(submission, typer.echo)
        ended = server.ended(submission)
    except KeyboardInterrupt:
        typer.echo(f"the job goes on; stop it with: elastic-train stop {name} --address {server.address}")
        return INTERRUPTED
    typer.echo(f"{submission.id}: {ended.state}")
    return OK if ended.state == "SUCCEEDED" else FAILED
