"""``elastic-train data audit``: proof that a job was trained on every sample once per epoch."""

from __future__ import annotations

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
    from elastic_train.checkpoint.catalog import list_checkpoints
    from elastic_train.cli.folder import open_folder
    from elastic_train.cli.progress import progress_bar
    from elastic_train.data.audit import audit_steps
    from elastic_train.data.sources import open_training
    from elastic_train.storage.json_lines import read_json_lines

    name, store = open_folder(job, storage, endpoint_url, region)
    settings, digest = _record(name, store)
    data = open_training(settings)
    if data.digest != digest:
        raise UserError(f"{name} was trained on data of digest {digest[:16]}; what is there now has {data.digest[:16]}")
    sources = [(s.name, len(d)) for s, d in zip(settings.data.all_sources, data.datasets, strict=True)]
    lines = read_json_lines(store, "steps.jsonl")
    reached = max(list_checkpoints(store), default=0)
    if not lines and not reached:
        raise UserError(f"{name} has no step in steps.jsonl and no checkpoint: there is nothing to audit")
    with progress_bar(unit="steps") as progress:
        task = progress.add_task("audit", total=None)
        audit = audit_steps(
            lines,
            data.batches,
            sources,
            reached,
            compare_bytes=compare,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    _tell(name, audit, [source for source, _ in sources])
    if audit.problems:
        raise typer.Exit(1)


def _record(name: str, store: Store) -> tuple[Job, str]:
    """The job as it was submitted first (what decides the samples cannot change afterwards), and its data's digest."""
    from elastic_train.config.job import Job
    from elastic_train.controller.job_folder import JobMismatch, read_record
    from elastic_train.storage.errors import NotFound

    try:
        record = read_record(store)
        return Job.model_validate(record["config"], strict=False), str(record["identity"]["data_digest"])
    except NotFound:
        raise UserError(f"{store.uri} has no job.json, so it is not known what {name} was trained on") from None
    except JobMismatch as error:
        raise UserError(str(error)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store.uri}/job.json is not the record of a job: {error}") from None


def _tell(name: str, audit: Audit, sources: list[str]) -> None:
    compared = f"the bytes of {audit.steps_compared:,} compared" if audit.steps_compared else "no bytes compared"
    typer.echo(f"{name}: {audit.steps:,} steps, {audit.samples:,} samples; {compared}")
    for source, epochs in zip(sources, audit.epochs, strict=False):
        typer.echo(f"  {source}: {epochs:.3f} epochs")
    if audit.unrecorded:
        typer.echo(f"  {audit.unrecorded:,} steps do not say what they were trained on")
    if audit.skipped:
        typer.echo(f"  {audit.skipped:,} steps were left out as bad; their samples count as used")
    for problem in audit.problems[:PROBLEMS_SHOWN]:
        typer.echo(f"  {problem.kind}: {problem.message}")
    if (more := len(audit.problems) - PROBLEMS_SHOWN) > 0:
        typer.echo(f"  and {more:,} more")
    if not audit.problems:
        typer.echo(_verdict(audit))


def _verdict(audit: Audit) -> str:
    """What has been proved."""
    if audit.steps_compared == audit.steps:
        return "no gap, no repeat: every step was trained on its own samples, each once"
    if audit.steps_compared:
        return f"no gap, no repeat in the {audit.steps_compared:,} steps that say what they were trained on"
    return "no gap, no repeat by what the log says; only a comparison of bytes proves it"
