"""checkpoint diff."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.guard import FAILED
from elastic_train.cli.options import AsJson, Endpoint, Region, StorageUri
from elastic_train.cli.progress import progress_bar
from elastic_train.cli.selection import select
from elastic_train.cli.tables import Column, count, moment, number, print_table, size

if TYPE_CHECKING:
    from elastic_train.checkpoint.compare import Comparison

HELP = r"Another checkpoint, JOB\[@STEP], in the same or another store and layout."


def diff(
    left: Annotated[str, typer.Argument(metavar="A", help=r"A checkpoint, JOB\[@STEP].")],
    right: Annotated[str, typer.Argument(metavar="B", help=HELP)],
    as_json: AsJson = False,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Compare two checkpoints: metadata, and every tensor bit for bit. Exit code 0: the same state, 1: another.

    The same state: equal tensors, step, cursor, seed, data and model; layout,
    claim, versions and metrics are shown and do not count. Blocks with equal
    checksums are not read; what is read is checked, a few MiB at a time.
    """
    from elastic_train.checkpoint.compare import Saved, compare

    chosen = [select(reference, storage, endpoint_url, region) for reference in (left, right)]
    saved = [Saved(each.store, each.manifest()) for each in chosen]
    with progress_bar(transient=True) as progress:
        task = progress.add_task("comparing", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        found = compare(saved[0], saved[1], report)
        progress.update(task, completed=found.read_bytes, total=found.read_bytes)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=1))
    else:
        for name, each in zip("AB", chosen, strict=True):
            typer.echo(f"{name}: step {each.id.step} in {each.store.uri}")
        _print(found)
    if not found.same:
        raise typer.Exit(FAILED)


def _as_json(found: Comparison) -> dict[str, Any]:
    return asdict(found) | {"same": found.same}


def _print(found: Comparison) -> None:
    if found.metadata:
        typer.echo()
        columns = Column("metadata", left=True), Column("A", left=True), Column("B", left=True)
        print_table(columns, ((key, _value(key, a), _value(key, b)) for key, (a, b) in found.metadata.items()))
    apart = list(_apart(found))
    if apart:
        typer.echo()
        print_table((Column("tensor", left=True), Column("A", left=True), Column("B", left=True)), apart)
    if found.tensors:
        typer.echo()
        columns = Column("tensor", left=True), Column("differing", count), Column("elements", count)
        rows = (
            (key, each.differing, found.elements[key], each.absolute, each.relative)
            for key, each in found.tensors.items()
        )
        print_table((*columns, Column("max abs", number), Column("max rel", number)), rows)
    typer.echo()
    typer.echo(_sum(found))


def _apart(found: Comparison) -> Iterator[tuple[str, str, str]]:
    """Tensors that cannot be compared."""
    for key in found.only[0]:
        yield key, "there", "-"
    for key in found.only[1]:
        yield key, "-", "there"
    for key, (ours, theirs) in found.unlike.items():
        yield key, ours, theirs


def _value(key: str, value: object) -> str:
    if key == "created" and isinstance(value, float):
        return moment(value)
    text = "-" if value is None else str(value)
    return f"{text[:16]}..." if len(text) == 64 else text


def _sum(found: Comparison) -> str:
    read = f"{size(found.read_bytes)} read"
    if found.same:
        return f"the same state: {found.equal:,} tensors are equal bit for bit ({read})"
    apart = len(found.only[0]) + len(found.only[1]) + len(found.unlike)
    parts = [f"other {', '.join(found.decisive)}"] if found.decisive else []
    parts += [f"{len(found.tensors):,} tensors differ"] if found.tensors else []
    parts += [f"{apart:,} cannot be compared"] if apart else []
    parts.append(f"{found.equal:,} tensors are equal")
    return f"not the same state: {', '.join(parts)} ({read})"
