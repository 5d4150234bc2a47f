"""checkpoint verify."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.folder import open_folder
from elastic_train.cli.guard import FAILED, UserError
from elastic_train.cli.options import AsJson, CheckpointRef, Endpoint, Region, StorageUri
from elastic_train.cli.progress import progress_bar
from elastic_train.cli.selection import only_job, select
from elastic_train.cli.tables import size

if TYPE_CHECKING:
    from elastic_train.checkpoint.catalog import Catalog
    from elastic_train.checkpoint.errors import Damage
    from elastic_train.checkpoint.manifest import CheckpointId


def verify(
    checkpoint: CheckpointRef,
    every: Annotated[bool, typer.Option("--all", help="Every committed checkpoint of JOB.")] = False,
    as_json: AsJson = False,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Read every byte of a checkpoint and compare checksums. Exit code 1 when damage is found.

    Each damage is named on stderr: object, byte range, tensor, what was
    expected and what was found. A store that does not answer is no damage:
    that is said, with exit code 1 as well.
    """
    from elastic_train.checkpoint.catalog import read_catalog

    if every:
        _, store = open_folder(only_job(checkpoint), storage, endpoint_url, region)
        catalog = read_catalog(store)
        ids = catalog.committed
        if not ids:
            raise UserError(f"{store.uri} has no committed checkpoint")
    else:
        chosen = select(checkpoint, storage, endpoint_url, region)
        catalog, ids = chosen.catalog, [chosen.id]
    done: list[Verdict] = []
    try:
        for each in ids:
            done.append(_verify_one(catalog, each))
            if not as_json:
                _tell(done[-1])
    finally:
        left = [str(each.step) for each in ids[len(done) :]]
        if done and left:
            typer.echo(f"not verified: step{'s' if left[1:] else ''} {', '.join(left)}", err=True)
    if as_json:
        typer.echo(json.dumps([verdict.as_dict() for verdict in done], indent=1))
    if not all(verdict.whole for verdict in done):
        raise typer.Exit(FAILED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found: ``damages``, or why the manifest cannot be read (``unreadable``)."""

    step: int
    objects: int = 0
    nbytes: int = 0
    damages: Sequence[Damage] = ()
    unreadable: str = ""

    @property
    def whole(self) -> bool:
        return not self.damages and not self.unreadable

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"damages": [asdict(damage) for damage in self.damages], "whole": self.whole}


def _tell(verdict: Verdict) -> None:
    """The damages on stderr, one line about the checkpoint on stdout."""
    for damage in verdict.damages or filter(None, [verdict.unreadable]):
        typer.echo(f"step {verdict.step}: damaged: {damage}", err=True)
    if verdict.unreadable:
        line = "DAMAGED: its manifest cannot be read"
    elif verdict.damages:
        paths = {damage.object for damage in verdict.damages}
        line = (
            f"DAMAGED: {len(verdict.damages)} place{'s' if verdict.damages[1:] else ''} in {len(paths)} of "
            f"{verdict.objects} objects"
        )
    else:
        line = f"whole: {size(verdict.nbytes)} in {verdict.objects} object{'' if verdict.objects == 1 else 's'}"
    typer.echo(f"step {verdict.step}: {line}")


def _verify_one(catalog: Catalog, checkpoint: CheckpointId) -> Verdict:
    from elastic_train.checkpoint.errors import CheckpointError
    from elastic_train.checkpoint.manifest import read_manifest
    from elastic_train.checkpoint.verify import examine

    try:
        manifest = read_manifest(catalog.store, checkpoint)
    except CheckpointError as error:
        return Verdict(checkpoint.step, unreadable=str(error))
    with progress_bar(transient=True) as progress:
        task = progress.add_task(f"step {checkpoint.step}", total=manifest.nbytes)
        damages = examine(catalog.store, manifest, catalog.entries, lambda nbytes: progress.advance(task, nbytes))
    return Verdict(checkpoint.step, len(manifest.objects), manifest.nbytes, damages)
