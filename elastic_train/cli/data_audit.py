"""``elastic-train data audit``: proof that a job was trained on every sample once per epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.guard import UserError
from elastic_train.cli.options import Endpoint, Region, StorageUri

if TYPE_CHECKING:
    from elastic_train.config.job import Job
    from elastic_train.data.audit import Audit
    from elastic_train.storage.store import Store

PROBLEMS_SHOWN = 20


def audit_data(
    job: Annotated[
        str,
        typer.Option("--job", metavar="JOB", help="Name of the job, its job file, or the URI of its folder."),
    ],
    compare: Annotated[
        bool, typer.Option("--bytes/--no-bytes", help="Read the data again and compare what every step was given.")
    ] = True,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Prove that no sample of a job was left out or repeated; exit code 1 where one was."""
    from elastic_train.cli.folder import open_folder
    from elastic_train.cli.progress import progress_bar
    from elastic_train.data.audit import audit_steps
    from elastic_train.data.sources import open_training
    from elastic_train.storage.json_lines import read_json_lines

    name, store = open_folder(job, storage, endpoint_url, region)
    settings = _settings(name, store)
    data = open_training(settings)
    sources = [(s.name, len(d)) for s, d in zip(settings.data.all_sources, data.datasets, strict=True)]
    lines = read_json_lines(store, "steps.jsonl")
    with progress_bar() as progress:
        task = progress.add_task("audit", total=None)
        audit = audit_steps(
            lines,
            data.batches,
            sources,
            compare_bytes=compare,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    _tell(name, audit, [source for source, _ in sources])
    if audit.problems:
        raise typer.Exit(1)


def _settings(name: str, store: Store) -> Job:
    """The job as it was submitted first: what decides the samples cannot change afterwards."""
    from elastic_train.config.job import Job
    from elastic_train.storage.errors import NotFound

    try:
        record = json.loads(store.read("job.json"))
        return Job.model_validate(record["config"], strict=False)
    except NotFound:
        raise UserError(f"{store.uri} has no job.json, so it is not known what {name} was trained on") from None
    except (ValueError, KeyError) as error:
        raise UserError(f"{store.uri}/job.json is not the record of a job: {error}") from None


def _tell(name: str, audit: Audit, sources: list[str]) -> None:
    compared = f"the bytes of {audit.steps_compared:,} compared" if audit.steps_compared else "no bytes compared"
    typer.echo(f"{name}: {audit.steps:,} steps, {audit.samples:,} samples; {compared}")
    for source, epochs in zip(sources, audit.epochs, strict=False):
        typer.echo(f"  {source}: {epochs:.3f} epochs")
    for problem in audit.problems[:PROBLEMS_SHOWN]:
        typer.echo(f"  {problem.kind}: {problem.message}")
    if (more := len(audit.problems) - PROBLEMS_SHOWN) > 0:
        typer.echo(f"  and {more:,} more")
    if not audit.problems:
        typer.echo("no gap, no repeat: every step was trained on its own samples, each once")
