"""checkpoint pin and unpin."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_train.cli.guard import UserError
from elastic_train.cli.options import CheckpointRef, Endpoint, Region, StorageUri
from elastic_train.cli.selection import select


def pin(
    checkpoint: CheckpointRef,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; shown by ls and show.")],
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Pin a checkpoint: retention never removes it. Pinning again replaces the reason."""
    from elastic_train.checkpoint.pins import pin as pin_it
    from elastic_train.checkpoint.pins import unpin as unpin_it

    chosen = select(checkpoint, storage, endpoint_url, region)
    pin_it(chosen.store, chosen.id, reason)
    if not chosen.store.exists(chosen.id.path):
        unpin_it(chosen.store, chosen.id)
        raise UserError(f"step {chosen.id.step} of {chosen.name} was removed by its job at this moment")
    typer.echo(f"step {chosen.id.step} of {chosen.name} is pinned: {reason}")


def unpin(
    checkpoint: CheckpointRef, storage: StorageUri = None, endpoint_url: Endpoint = None, region: Region = None
) -> None:
    """Take the pin of a checkpoint away: retention treats it as any other."""
    from elastic_train.checkpoint.pins import pin_reason
    from elastic_train.checkpoint.pins import unpin as unpin_it

    chosen = select(checkpoint, storage, endpoint_url, region)
    before = pin_reason(chosen.store, chosen.id)
    unpin_it(chosen.store, chosen.id)
    was = "was not pinned" if before is None else f"is pinned no longer; it was: {before}"
    typer.echo(f"step {chosen.id.step} of {chosen.name} {was}")
