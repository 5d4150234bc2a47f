"""checkpoint ls and show."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.folder import open_folder
from elastic_train.cli.options import AsJson, CheckpointRef, Endpoint, JobRef, Region, StorageUri
from elastic_train.cli.selection import Selection, only_job, select
from elastic_train.cli.tables import Column, age, count, layout_name, moment, number, print_table, size

if TYPE_CHECKING:
    from elastic_train.checkpoint.manifest import Manifest, TensorRecord
    from elastic_train.checkpoint.survey import Found

COLUMNS = (
    Column("step"),
    Column("status", left=True),
    Column("age", age),
    Column("gen"),
    Column("claim"),
    Column("layout", left=True),
    Column("objects", count),
    Column("bytes", size),
    Column("loss", number),
    Column("eval_loss", number),
)


def list_all(
    job: JobRef,
    as_json: AsJson = False,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """List all checkpoints of a job, and what is there and does not count: incomplete, fenced, refused, unreadable.

    Elsewhere than on a terminal: lines with tabs, exact bytes, age in seconds,
    and the reason of each status.
    """
    from rich.console import Console

    from elastic_train.checkpoint.catalog import read_catalog
    from elastic_train.checkpoint.survey import survey

    _, store = open_folder(only_job(job), storage, endpoint_url, region)
    lines = survey(read_catalog(store))
    if as_json:
        typer.echo(json.dumps([_as_json(line) for line in lines], indent=1))
        return
    if not lines:
        typer.echo(f"no checkpoint in {store.uri}")
        return
    console = Console()
    rows = [_row(line) for line in lines]
    if not console.is_terminal:
        noted = [(*row, line.note) for row, line in zip(rows, lines, strict=True)]
        print_table((*COLUMNS, Column("note", left=True)), noted)
        return
    print_table(COLUMNS, rows)
    for line in lines:
        if line.note:
            console.print(f"step {line.step} is {line.status.value}: {line.note}", markup=False, highlight=False)


def _row(line: Found) -> tuple[Any, ...]:
    manifest = line.manifest
    metrics = manifest.metrics if manifest else {}
    return (
        line.step,
        line.status.value,
        round(time.time() - line.modified),
        line.generation,
        line.claim,
        layout_name(manifest.layout) if manifest else None,
        line.objects or None,
        line.nbytes or None,
        metrics.get("loss"),
        metrics.get("eval_loss"),
    )


def _as_json(line: Found) -> dict[str, Any]:
    manifest = line.manifest
    return {
        "step": line.step,
        "status": line.status.value,
        "note": line.note,
        "created": line.modified,
        "generation": line.generation,
        "claim": line.claim,
        "layout": manifest.layout if manifest else None,
        "objects": line.objects,
        "nbytes": line.nbytes,
        "metrics": manifest.metrics if manifest else {},
    }


def show(
    checkpoint: CheckpointRef,
    tensors: Annotated[
        str, typer.Option(metavar="GLOB", help="Which tensors to list, e.g. 'param.model.layers.0.*'.")
    ] = "*",
    as_json: AsJson = False,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Show what a checkpoint holds: metadata, sums by kind of state, tensors. Reads its manifest only."""
    chosen = select(checkpoint, storage, endpoint_url, region)
    manifest = chosen.manifest()
    listed = {key: record for key, record in manifest.tensors.items() if fnmatchcase(key, tensors)}
    if as_json:
        content = manifest.model_copy(update={"tensors": listed}).model_dump(mode="json")
        typer.echo(json.dumps({"uri": chosen.store.uri, **content}, indent=1))
        return
    for name, value in _metadata(chosen, manifest):
        typer.echo(f"{name:<11}{value}")
    typer.echo()
    print_table(
        (Column("kind", left=True), Column("tensors", count), Column("elements", count), Column("bytes", size)),
        _kinds(manifest),
    )
    typer.echo()
    if not listed:
        typer.echo(f"no tensor matches {tensors!r}")
        return
    columns = Column("tensor", left=True), Column("dtype", left=True), Column("shape"), Column("chunks", count)
    print_table((*columns, Column("bytes", size)), (_tensor(key, record) for key, record in listed.items()))


def _metadata(chosen: Selection, manifest: Manifest) -> Iterator[tuple[str, str]]:
    from elastic_train.checkpoint.pins import pin_reason

    yield "folder", chosen.store.uri
    yield "manifest", chosen.id.path
    if (reason := pin_reason(chosen.store, chosen.id)) is not None:
        yield "pinned", reason
    yield (
        "step",
        f"{manifest.step:,}; next sample {manifest.cursor:,}; seed {manifest.seed}; saved {moment(manifest.created)}",
    )
    yield "layout", f"{layout_name(manifest.layout)}; generation {manifest.generation}, claim {manifest.claim}"
    if manifest.metrics:
        yield "metrics", "  ".join(f"{name} {number(value)}" for name, value in manifest.metrics.items())
    yield (
        "model",
        "  ".join(f"{name} {value}" for name, value in manifest.model.items() if value is not None) or "not described",
    )
    yield "digests", f"job {manifest.config_digest[:16]}  data {manifest.data_digest[:16]}"
    yield "versions", "  ".join(f"{library} {version}" for library, version in manifest.versions.items())
    objects = len(manifest.objects)
    yield "storage", f"{manifest.nbytes:,} bytes in {objects} object{'' if objects == 1 else 's'}"


def _kinds(manifest: Manifest) -> Iterator[tuple[str, int, int, int]]:
    """Per kind of state, the part of the keys before the first dot: tensors, elements, bytes; then the sums."""
    kinds: dict[str, list[int]] = {}
    for key, record in manifest.tensors.items():
        row = kinds.setdefault(key.partition(".")[0], [0, 0, 0])
        for place, value in enumerate((1, math.prod(record.shape), _nbytes(record))):
            row[place] += value
    for kind, row in kinds.items():
        yield kind, row[0], row[1], row[2]
    if len(kinds) > 1:
        tensors, elements, nbytes = (sum(column) for column in zip(*kinds.values(), strict=True))
        yield "all", tensors, elements, nbytes


def _tensor(key: str, record: TensorRecord) -> tuple[Any, ...]:
    shape = " x ".join(map(str, record.shape)) or "scalar"
    return key, record.dtype, shape, len(record.chunks), _nbytes(record)


def _nbytes(record: TensorRecord) -> int:
    return sum(chunk.nbytes for chunk in record.chunks)
