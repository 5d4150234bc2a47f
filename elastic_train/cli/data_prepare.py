"""data prepare: text or conversations to token shards."""

from __future__ import annotations

import os
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.counts import counted
from elastic_train.cli.guard import UserError
from elastic_train.cli.options import Endpoint
from elastic_train.cli.progress import phase_reporter, progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elastic_train.config.job import Job
    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.chat import ChatTemplate
    from elastic_train.data.corpus import Format
    from elastic_train.data.stages import Run
    from elastic_train.data.tokenizer import GivenTokenizer

VOCABULARY = 4096


class FormatName(StrEnum):
    """``auto``: by the names of the files."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    CHAT = "chat"


FORMATS: dict[FormatName, Format | None] = {
    FormatName.AUTO: None,
    FormatName.TEXT: "text",
    FormatName.JSONL: "jsonl",
    FormatName.PARQUET: "parquet",
    FormatName.CHAT: "chat",
}


def prepare_data(
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "--corpus",
            metavar="URI",
            help="python-stdlib, python-doc, a file, a folder, a glob, or an s3:// prefix; can be given several times "
            "(default: python-stdlib).",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "--out",
            metavar="URI",
            help="Folder for the data set, a path or s3:// (default: runs/data/NAME).",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="tokenizer.json, Hugging Face folder, or prepared data set whose tokenizer is used; none is trained.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=257, help=f"Entries of the byte-level BPE tokenizer that is trained (default: {VOCABULARY})."),
    ] = None,
    eos_token: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Entry of a given tokenizer that ends a document.")
    ] = None,
    format: Annotated[FormatName, typer.Option(help="What the files are; auto: their names say it.")] = FormatName.AUTO,
    column: Annotated[str, typer.Option(help="JSON field or Parquet column that holds the text.")] = "text",
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja template of conversations (default: the tokenizer's).")
    ] = None,
    max_characters: Annotated[int | None, typer.Option(min=1, help="Longer documents are left out.")] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep documents that equal earlier ones.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Do the work on a Ray cluster; its nodes must reach input and output.")
    ] = False,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster (default: RAY_ADDRESS, else auto).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set of other inputs.")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Turn text into a tokenizer, token shards and a manifest. What is there already is reused, also what a run that
    was killed has left.
    """
    from elastic_train.data.corpus import open_corpus
    from elastic_train.data.given import open_tokenizer
    from elastic_train.data.prepare import prepare

    if tokenizer is not None and vocab_size is not None:
        raise UserError("give --vocab-size or --tokenizer, which has its own vocabulary")
    if eos_token is not None and tokenizer is None:
        raise UserError("--eos-token is for a tokenizer that is given; give --tokenizer as well")
    given = open_tokenizer(tokenizer, storage_of(tokenizer, endpoint_url), eos_token) if tokenizer else None
    chat = _chat(format, chat_template, tokenizer, given, endpoint_url)
    sources = inputs or ["python-stdlib"]
    storage = next((found for source in sources if (found := storage_of(source, endpoint_url))), None)
    corpus = open_corpus(*sources, storage=storage, format=FORMATS[format], column=column, chat=chat)
    out = output or f"runs/data/{corpus.name}"
    with _runner(ray, address) as run, progress_bar() as progress:
        made = prepare(
            corpus,
            out,
            vocab_size or VOCABULARY,
            storage=storage_of(out, endpoint_url),
            progress=phase_reporter(progress),
            overwrite=overwrite,
            given=given,
            max_characters=max_characters,
            keep_duplicates=keep_duplicates,
            run=run,
        )
    uri = made.uri.encode("utf-8", "backslashreplace").decode()  # names of folders need not be UTF-8
    typer.echo(f"{uri}: {'already there' if made.reused else 'written'}")
    describe(made.manifest)


def _chat(
    format: FormatName,
    template: Path | None,
    tokenizer: str | None,
    given: GivenTokenizer | None,
    endpoint_url: str | None,
) -> ChatTemplate | None:
    """The template of conversations, None for other formats."""
    if format is not FormatName.CHAT:
        if template is not None:
            raise UserError("--chat-template is for conversations; give --format chat")
        return None
    if tokenizer is None or given is None:
        raise UserError(
            "--format chat needs the tokenizer whose special tokens the chat template has; give --tokenizer"
        )
    from elastic_train.data.chat import chat_template, read_chat_template, tokenizer_settings
    from elastic_train.data.given import folder_of
    from elastic_train.data.tokenizer import parse_tokenizer, special_tokens
    from elastic_train.storage.store import Store

    place = folder_of(tokenizer)
    folder = Store.open(place, storage_of(place, endpoint_url))
    if template is None:
        found = read_chat_template(folder)
    else:
        try:
            found = chat_template(template.read_text(encoding="utf-8"), tokenizer_settings(folder))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--chat-template {template} cannot be read: {error}") from None
    return found.guarding(special_tokens(parse_tokenizer(given)))


@contextmanager
def _runner(ray: bool, address: str | None) -> Iterator[Run]:
    """Who does the work."""
    if not ray:
        if address is not None:
            raise UserError("--address is that of a Ray cluster; give --ray as well")
        from elastic_train.data.stages import one_by_one

        yield one_by_one
        return
    from elastic_train.cli.reachable import cluster_problem
    from elastic_train.controller.ray_prepare import cluster_runner

    if (problem := cluster_problem(address)) is not None:
        raise UserError(problem)
    with cluster_runner(address or os.environ.get("RAY_ADDRESS") or "auto") as run:
        yield run


def describe(manifest: Any) -> None:
    """What a data set holds, in a few lines."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(manifest.left_out_counts.items()))
    left_out = f" ({manifest.left_out_documents:,} left out{': ' if kinds else ''}{kinds})"
    typer.echo(f"documents:  {manifest.documents:,}" + (left_out if manifest.left_out_documents else ""))
    typer.echo(f"tokens:     {manifest.tokens:,} ({manifest.dtype}) in {counted(len(manifest.shards), 'shard')}")
    typer.echo(f"vocabulary: {manifest.tokenizer.vocab_size:,}")
    if manifest.labelled:
        typer.echo("labels:     only the assistant's tokens count in the loss")


def storage_of(uri: str, endpoint_url: str | None) -> StorageConfig | None:
    """Settings for a URI in object storage; None for a local one."""
    if not uri.startswith("s3://"):
        return None
    from elastic_train.config.operation import StorageConfig

    return StorageConfig(uri=uri, endpoint_url=endpoint_url)


def prepare_missing(job: Job) -> None:
    """Prepare the job's data sets that are not there and whose folders are named after a corpus every machine has, all
    with the same tokenizer: that of the first one that is there, else the first one's.
    """
    from elastic_train.data.corpus import open_corpus
    from elastic_train.data.given import given_tokenizer
    from elastic_train.data.manifest import MANIFEST
    from elastic_train.data.prepare import prepare
    from elastic_train.storage.store import Store

    stores = {source.uri: Store.open(source.uri, job.storage) for source in job.data.all_sources}
    there = [uri for uri, store in stores.items() if store.exists(MANIFEST)]
    names = {uri: uri.rstrip("/").rpartition("/")[2] for uri in stores if uri not in there}
    for uri, name in names.items():
        if name not in ("python-stdlib", "python-doc"):
            continue
        typer.echo(f"preparing {uri}")
        given = given_tokenizer(stores[there[0]]) if there else None
        with progress_bar() as progress:
            report = phase_reporter(progress)
            prepare(open_corpus(name), uri, job.model.vocab_size, storage=job.storage, progress=report, given=given)
        there.append(uri)
