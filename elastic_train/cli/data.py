"""Verbs about data sets: data prepare, data inspect. And the check of a job against its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.guard import UserError
from elastic_train.cli.options import Endpoint
from elastic_train.cli.progress import phase_reporter, progress_bar

if TYPE_CHECKING:
    from elastic_train.config.job import Job
    from elastic_train.config.operation import StorageConfig

app = typer.Typer(help="Prepare and inspect token shards.", no_args_is_help=True)


@app.command("prepare")
def prepare_data(
    corpus: Annotated[
        str, typer.Option(help="python-stdlib, python-doc, or a text file or folder of text files.")
    ] = "python-stdlib",
    out: Annotated[
        str | None, typer.Option(help="Folder for the shards, a path or s3:// URI (default: runs/data/CORPUS).")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=257, help="Entries of the byte-level BPE tokenizer that is trained (default: 4096)."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Prepared data set or Hugging Face folder whose tokenizer is used; none is trained."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set of other inputs.")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Turn a corpus into a tokenizer, token shards and a manifest. What is there already is reused."""
    from elastic_train.data.corpus import open_corpus
    from elastic_train.data.prepare import given_tokenizer, prepare
    from elastic_train.storage.store import Store

    if tokenizer is not None and vocab_size is not None:
        raise UserError("give --vocab-size or --tokenizer, which has its own vocabulary")
    given = given_tokenizer(Store.open(tokenizer, _storage(tokenizer, endpoint_url))) if tokenizer else None
    source = open_corpus(corpus)
    folder = out or f"runs/data/{source.name}"
    with progress_bar() as progress:
        report = phase_reporter(progress)
        made = prepare(
            source,
            folder,
            vocab_size or 4096,
            storage=_storage(folder, endpoint_url),
            progress=report,
            overwrite=overwrite,
            given=given,
        )
    typer.echo(f"{made.uri}: {'already there' if made.reused else 'written'}")
    _describe(made.manifest)


@app.command("inspect")
def inspect_data(
    uri: Annotated[str, typer.Argument(help="Folder that holds manifest.json, a path or s3:// URI.")],
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Count samples of this many tokens.")] = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Show what a data set holds."""
    from elastic_train.data.manifest import read_manifest
    from elastic_train.storage.store import Store

    manifest, digest = read_manifest(Store.open(uri, _storage(uri, endpoint_url)))
    typer.echo(f"{uri}: manifest {digest[:16]}")
    _describe(manifest)
    if sequence_length:
        typer.echo(f"samples:    {max(manifest.tokens - 1, 0) // sequence_length:,} of {sequence_length} tokens")
    for shard in manifest.shards:
        typer.echo(
            f"shard:      {shard.path}  {shard.tokens:,} tokens  {shard.bytes:,} bytes  {len(shard.batches)} batches"
        )


def _describe(manifest: Any) -> None:
    skipped = manifest.left_out_documents
    typer.echo(f"documents:  {manifest.documents:,}" + (f" ({skipped} left out)" if skipped else ""))
    typer.echo(f"tokens:     {manifest.tokens:,} ({manifest.dtype}) in {len(manifest.shards)} shards")
    typer.echo(f"vocabulary: {manifest.tokenizer.vocab_size:,}")


def _storage(uri: str, endpoint_url: str | None) -> StorageConfig | None:
    if not uri.startswith("s3://"):
        return None
    from elastic_train.config.operation import StorageConfig

    return StorageConfig(uri=uri, endpoint_url=endpoint_url)


def prepare_missing(job: Job) -> None:
    """Prepare the job's data set if it is not there and its folder is named after a corpus every machine has."""
    from elastic_train.data.corpus import open_corpus
    from elastic_train.data.manifest import MANIFEST
    from elastic_train.data.prepare import prepare
    from elastic_train.storage.store import Store

    name = job.data.uri.rstrip("/").rpartition("/")[2]
    if name not in ("python-stdlib", "python-doc") or Store.open(job.data.uri, job.storage).exists(MANIFEST):
        return
    typer.echo(f"preparing {job.data.uri}")
    with progress_bar() as progress:
        report = phase_reporter(progress)
        prepare(open_corpus(name), job.data.uri, job.model.vocab_size, storage=job.storage, progress=report)


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
