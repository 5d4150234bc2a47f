"""Verbs about data sets: data prepare, data inspect. And the check of a job against its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.data_prepare import describe, prepare_data, storage_of
from elastic_train.cli.options import Endpoint

if TYPE_CHECKING:
    from elastic_train.config.job import Job

app = typer.Typer(help="Prepare and inspect token shards.", no_args_is_help=True)


app.command("prepare")(prepare_data)


@app.command("inspect")
def inspect_data(
    uri: Annotated[str, typer.Argument(help="Folder that holds manifest.json, a path or s3:// URI.")],
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Count samples of this many tokens.")] = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Show what a data set holds."""
    from elastic_train.data.manifest import read_manifest
    from elastic_train.storage.store import Store

    manifest, digest = read_manifest(Store.open(uri, storage_of(uri, endpoint_url)))
    typer.echo(f"{uri}: manifest {digest[:16]}")
    describe(manifest)
    if sequence_length:
        typer.echo(f"samples:    {max(manifest.tokens - 1, 0) // sequence_length:,} of {sequence_length} tokens")
    for shard in manifest.shards:
        typer.echo(
            f"shard:      {shard.path}  {shard.tokens:,} tokens  {shard.bytes:,} bytes  {len(shard.batches)} batches"
        )


def data_problems(job: Job) -> list[str]:
    """Why the job cannot be trained and evaluated on its data sets; empty when it can. Raises DataError for none."""
    from elastic_train.data.evaluation import unfit_for_evaluation
    from elastic_train.data.manifest import read_manifest
    from elastic_train.storage.store import Store

    manifest, _ = read_manifest(Store.open(job.data.uri, job.storage))
    samples = max(manifest.tokens - 1, 0) // job.data.sequence_length
    problems = []
    if samples < job.training.global_batch:
        problems.append(
            f"data.uri={job.data.uri}: {samples} sequences of {job.data.sequence_length} tokens are fewer than "
            f"training.global_batch={job.training.global_batch}"
        )
    if manifest.tokenizer.vocab_size > job.model.vocab_size:
        problems.append(
            f"model.vocab_size={job.model.vocab_size}: must be at least {manifest.tokenizer.vocab_size}, "
            f"the vocabulary of data.uri={job.data.uri}"
        )
    if job.data.document_mask and manifest.documents < 2:
        problems.append(
            f"data.document_mask=true: data.uri={job.data.uri} holds {manifest.documents} document: there is nothing "
            "to mask; prepare it from a file per document, or leave document_mask out"
        )
    return problems + unfit_for_evaluation(job, manifest)
