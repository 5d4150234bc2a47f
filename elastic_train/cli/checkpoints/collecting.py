"""checkpoint gc: what retention keeps and removes, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.folder import is_job_file, open_folder
from elastic_train.cli.guard import UserError
from elastic_train.cli.options import AsJson, Endpoint, JobRef, Region, StorageUri
from elastic_train.cli.selection import only_job
from elastic_train.cli.tables import Column, age, print_table, size

if TYPE_CHECKING:
    from elastic_train.checkpoint.manifest import CheckpointId
    from elastic_train.checkpoint.retention import RetentionPlan
    from elastic_train.config.operation import CheckpointConfig
    from elastic_train.storage.store import Store

Rows = list[tuple[int, int, str, str, int]]


def collect(
    job: JobRef,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and stop.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    keep_last: Annotated[int | None, typer.Option(min=1, help="Instead of checkpoint.keep_last.")] = None,
    grace_seconds: Annotated[float | None, typer.Option(min=0, help="Instead of checkpoint.grace_seconds.")] = None,
    as_json: AsJson = False,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Show what retention keeps and removes, and why; and remove it, after a question.

    The rules are the `checkpoint` section of JOB when that is a job file, else
    that of job.json (the first submission). Removing is done on behalf of the
    newest claim, as the job itself does it after each save.
    """
    from elastic_train.checkpoint.claims import newest_claim
    from elastic_train.checkpoint.retention import apply_retention, plan_retention

    _, store = open_folder(only_job(job), storage, endpoint_url, region)
    config, origin = _rules(job, store, keep_last, grace_seconds)
    claim = newest_claim(store)
    plan = plan_retention(store, config, claim)
    rows = _rows(store, plan)
    if as_json:
        typer.echo(json.dumps(_as_json(config, plan, rows), indent=1))
    else:
        _print(config, origin, plan, rows)
    if dry_run or not (plan.delete or plan.garbage or plan.unfinished):
        return
    if claim is None:
        raise UserError(f"nobody has a claim on {store.uri}, so there is nobody to remove anything for")
    _tell(f"removing on behalf of claim {claim.number}, of {claim.holder}", as_json)
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("nothing is removed without a terminal to ask on; give --yes or --dry-run")
        typer.confirm("remove it?", abort=True, err=True)
    removed = apply_retention(store, plan, claim)
    _tell(f"removed {_things(len(removed.steps), 'checkpoint')}, {_things(removed.objects, 'object')}", as_json)


def _rules(job: str, store: Store, keep_last: int | None, grace_seconds: float | None) -> tuple[CheckpointConfig, str]:
    """The rules, and where they are from."""
    from elastic_train.config.load import load_job
    from elastic_train.config.operation import CheckpointConfig
    from elastic_train.controller.job_folder import JobMismatch, read_record
    from elastic_train.storage.errors import NotFound

    if is_job_file(job):
        config, origin = load_job(job).checkpoint, job
    else:
        try:
            record = read_record(store)
        except NotFound:
            raise UserError(f"{store.uri} has no job.json with rules; give the job file instead") from None
        except JobMismatch as error:
            raise UserError(f"{error}; give the job file instead") from None
        section = record["config"].get("checkpoint", {})
        config, origin = CheckpointConfig.model_validate(section, strict=False), "job.json"
    given = {"keep_last": keep_last, "grace_seconds": grace_seconds}
    return config.model_copy(update={key: value for key, value in given.items() if value is not None}), origin


def _rows(store: Store, plan: RetentionPlan) -> Rows:
    """step, claim, keep or remove, why, bytes"""
    from elastic_train.checkpoint.catalog import read_catalog
    from elastic_train.checkpoint.survey import survey

    sizes = {(line.step, line.claim): line.nbytes for line in survey(read_catalog(store))}

    def row(checkpoint: CheckpointId, fate: str, why: str) -> tuple[int, int, str, str, int]:
        return checkpoint.step, checkpoint.claim, fate, why, sizes.get((checkpoint.step, checkpoint.claim), 0)

    kept = [row(checkpoint, "keep", ", ".join(reasons)) for checkpoint, reasons in plan.keep.items()]
    return sorted([*kept, *(row(checkpoint, "remove", "no rule keeps it") for checkpoint in plan.delete)])


def _print(config: CheckpointConfig, origin: str, plan: RetentionPlan, rows: Rows) -> None:
    best = f"the best {config.keep_best} by {config.metric}" if config.keep_best else "none by metric"
    every = f"every {config.keep_every}" if config.keep_every else "no others by step"
    grace = age(config.grace_seconds)
    typer.echo(f"rules ({origin}): keep the newest {config.keep_last}, {every}, {best}; grace time {grace}")
    columns = Column("step"), Column("claim"), Column("", left=True), Column("why", left=True), Column("bytes", size)
    print_table(columns, rows)
    for line in _remains(plan):
        typer.echo(line)
    typer.echo(f"{_things(len(plan.delete), 'checkpoint')} to remove, {size(plan.nbytes)} in all to free")


def _remains(plan: RetentionPlan) -> Iterator[str]:
    """Garbage by folder, and unfinished writes."""
    folders: dict[str, list[int]] = {}
    for entry in plan.garbage:
        folders.setdefault(entry.path.rpartition("/")[0], []).append(entry.size)
    for folder, sizes in folders.items():
        yield f"garbage: {_things(len(sizes), 'object')} in {folder}, {size(sum(sizes))}"
    for write in plan.unfinished:
        yield f"unfinished write: {write.path}"


def _as_json(config: CheckpointConfig, plan: RetentionPlan, rows: Rows) -> dict[str, Any]:
    return {
        "rules": config.model_dump(mode="json"),
        "checkpoints": [
            {"step": step, "claim": claim, "fate": fate, "why": why, "nbytes": nbytes}
            for step, claim, fate, why, nbytes in rows
        ],
        "garbage": [entry.path for entry in plan.garbage],
        "unfinished": [write.path for write in plan.unfinished],
        "nbytes": plan.nbytes,
    }


def _tell(sentence: str, as_json: bool) -> None:
    typer.echo(sentence, err=as_json)


def _things(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
