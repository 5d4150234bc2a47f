"""checkpoint copy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.folder import is_job_file, is_uri, locate_folder
from elastic_train.cli.guard import UserError
from elastic_train.cli.options import CheckpointRef, Endpoint, Region, StorageUri
from elastic_train.cli.progress import progress_bar
from elastic_train.cli.selection import select
from elastic_train.cli.tables import size

if TYPE_CHECKING:
    from elastic_train.checkpoint.copying import Copied

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""As in ``config.job``."""


def copy(
    checkpoint: CheckpointRef,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URI of a job folder, new or of the same job.")],
    pin: Annotated[str | None, typer.Option(metavar="REASON", help="Pin the copy, so that retention keeps it.")] = None,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Copy a checkpoint into another job folder; every byte is verified on the way.

    A new folder becomes a job folder: a job with its name and storage goes on
    from the copy. The copy exists when the last byte is in, not before; one
    that was cut short goes on where it was, one that is there is left alone.
    """
    from elastic_train.checkpoint.copying import copy_checkpoint
    from elastic_train.controller.job_copy import adopt_job
    from elastic_train.controller.job_folder import JobMismatch

    chosen = select(checkpoint, storage, endpoint_url, region)
    manifest = chosen.manifest()
    if not is_uri(target) or is_job_file(target):
        raise UserError(f"{target!r}: give the URI of a job folder, e.g. ./{target} or s3://bucket/jobs/{target}")
    name, store, reached = locate_folder(target, None, endpoint_url, region)
    if not JOB_NAME.fullmatch(name):
        raise UserError(
            f"{target}: the folder's name {name!r} must be one of a job: 1 to 63 letters, digits, '.', '_' or '-'"
        )
    reached.exists("job.json")
    try:
        new = store.uri != chosen.store.uri and adopt_job(chosen.store, store, name)
    except JobMismatch as error:
        raise UserError(str(error)) from None
    with progress_bar(transient=True) as progress:
        task = progress.add_task(f"step {manifest.step}", total=manifest.nbytes)
        copied = copy_checkpoint(chosen.store, manifest, store, pin, lambda nbytes: progress.advance(task, nbytes))
    typer.echo(_told(copied, store.uri))
    if new:
        typer.echo(f"a job with name {name} and storage.uri {store.uri.rpartition('/')[0]} goes on from there")


def _told(copied: Copied, uri: str) -> str:
    manifest = copied.manifest
    if not copied.created:
        return f"step {manifest.step} is in {uri} already; nothing to do"
    reused = f", {size(copied.reused)} of it there from an earlier copy" if copied.reused else ""
    return (
        f"step {manifest.step} copied to {uri} as {manifest.id.path}: {size(manifest.nbytes)} in "
        f"{len(manifest.objects)} object{'' if len(manifest.objects) == 1 else 's'}, all verified{reused}"
    )
