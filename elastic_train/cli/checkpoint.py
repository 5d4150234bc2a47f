"""Verbs about checkpoints: checkpoint ls, show, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.guard import FAILED, UserError

if TYPE_CHECKING:
    from elastic_train.storage.store import Store

app = typer.Typer(help="List, show and verify the checkpoints of a job.", no_args_is_help=True)

JobRef = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job, or its job file.")]
StorageUri = Annotated[str, typer.Option("--storage", help="Where job folders are: path or s3:// URI.")]
Endpoint = Annotated[str | None, typer.Option("--endpoint-url", help="S3 endpoint of another provider.")]
Step = Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")]


def _open(job: str, storage: str, endpoint_url: str | None) -> tuple[str, Store]:
    from elastic_train.cli.folder import open_folder

    return open_folder(job, storage, endpoint_url)


@app.command("ls")
def list_all(job: JobRef, storage: StorageUri = "runs", endpoint_url: Endpoint = None) -> None:
    """List committed checkpoints, and uploads that were never committed."""
    from elastic_train.checkpoint.catalog import read_catalog
    from elastic_train.checkpoint.errors import CheckpointError
    from elastic_train.checkpoint.manifest import read_manifest

    name, store = _open(job, storage, endpoint_url)
    committed: set[tuple[int, int]] = set()
    catalog = read_catalog(store)
    for checkpoint in catalog.committed:
        step = checkpoint.step
        try:
            manifest = read_manifest(store, checkpoint)
        except CheckpointError as error:
            typer.echo(f"step {step:>8}  unreadable: {error}")
            continue
        committed.add((step, manifest.generation))
        typer.echo(
            f"step {step:>8}  committed   generation {manifest.generation}  {_layout(manifest.layout)}  "
            f"{len(manifest.objects)} objects  {manifest.nbytes:,} bytes"
        )
    for step, generation in sorted(catalog.attempts - committed):
        typer.echo(f"step {step:>8}  incomplete  generation {generation}: objects without a manifest, ignored")
    if not committed and not catalog.attempts:
        typer.echo(f"{name}: no checkpoint in {store.uri}")


@app.command("show")
def show(job: JobRef, step: Step = None, storage: StorageUri = "runs", endpoint_url: Endpoint = None) -> None:
    """Show what a checkpoint holds."""
    from elastic_train.checkpoint.catalog import load_manifest

    _, store = _open(job, storage, endpoint_url)
    manifest = load_manifest(store, newest(store) if step is None else step)
    typer.echo(
        f"step {manifest.step}  cursor {manifest.cursor}  seed {manifest.seed}  generation {manifest.generation}"
    )
    typer.echo(
        f"layout {_layout(manifest.layout)}  config {manifest.config_digest[:16]}  data {manifest.data_digest[:16]}"
    )
    typer.echo("versions " + "  ".join(f"{library} {version}" for library, version in manifest.versions.items()))
    for path, nbytes in manifest.objects.items():
        typer.echo(f"object {path}  {nbytes:,} bytes")
    for key, record in manifest.tensors.items():
        shape = " x ".join(map(str, record.shape)) or "scalar"
        typer.echo(f"tensor {key}  {record.dtype}  {shape}  {len(record.chunks)} chunks")


@app.command("verify")
def verify(
    job: JobRef,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every committed checkpoint.")] = False,
    storage: StorageUri = "runs",
    endpoint_url: Endpoint = None,
) -> None:
    """Read every byte of a checkpoint and compare checksums. Exit code 1 when damage is found."""
    from elastic_train.checkpoint.catalog import list_checkpoints
    from elastic_train.checkpoint.errors import CheckpointError

    _, store = _open(job, storage, endpoint_url)
    steps = list_checkpoints(store) if every else [newest(store) if step is None else step]
    if not every and steps[0] not in list_checkpoints(store):
        raise UserError(f"step {steps[0]} has no committed checkpoint in {store.uri}")
    damaged = False
    for each in steps:
        try:
            found = _verify_one(store, each)
        except CheckpointError as error:
            found = [str(error)]
        damaged = damaged or bool(found)
        for sentence in found:
            typer.echo(f"step {each}: damaged: {sentence}", err=True)
        if not found:
            typer.echo(f"step {each}: whole")
    if damaged:
        raise typer.Exit(FAILED)


def _verify_one(store: Store, step: int) -> list[str]:
    from elastic_train.checkpoint.catalog import load_manifest
    from elastic_train.checkpoint.verify import check, verify_checkpoint
    from elastic_train.cli.data import progress_bar

    manifest = load_manifest(store, step)
    damages = check(store, manifest, "sizes")
    if not damages:
        total = sum(chunk.nbytes for record in manifest.tensors.values() for chunk in record.chunks)
        with progress_bar() as progress:
            task = progress.add_task(f"step {step}", total=total)
            damages = verify_checkpoint(store, manifest, lambda nbytes: progress.advance(task, nbytes))
    return [str(damage) for damage in damages]


def newest(store: Store) -> int:
    """The highest committed step."""
    from elastic_train.checkpoint.catalog import list_checkpoints

    steps = list_checkpoints(store)
    if not steps:
        raise UserError(f"{store.uri} has no committed checkpoint")
    return steps[-1]


def _layout(sizes: dict[str, int]) -> str:
    from elastic_train.config.layout import Layout

    return str(Layout(**sizes))
