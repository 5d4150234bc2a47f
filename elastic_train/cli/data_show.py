"""data inspect, data verify and data show."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.counts import counted
from elastic_train.cli.data_prepare import describe, storage_of
from elastic_train.cli.guard import FAILED, UserError
from elastic_train.cli.options import Endpoint
from elastic_train.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

    from elastic_train.data.dataset import TokenDataset

DataUri = Annotated[str, typer.Argument(help="Folder that holds manifest.json, a path or s3:// URI.")]
PackingOption = Annotated[str, typer.Option(metavar="stream|documents|none", help="As data.packing of a job.")]
TailsOption = Annotated[
    str | None, typer.Option(metavar="keep|drop", help="As data.tails of a job (default: that of the packing).")
]


def inspect(
    uri: DataUri,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Count samples of this many tokens.")] = None,
    packing: PackingOption = "stream",
    tails: TailsOption = None,
    shards: Annotated[bool, typer.Option("--shards", help="List the shards, also when there are many.")] = False,
    endpoint_url: Endpoint = None,
) -> None:
    """Show what a data set holds. Reads its manifest and, for packing by documents, where they end; no shard."""
    from elastic_train.data.manifest import read_manifest
    from elastic_train.storage.store import Store

    manifest, digest = read_manifest(Store.open(uri, storage_of(uri, endpoint_url)))
    typer.echo(f"{uri}: manifest {digest[:16]}, format {manifest.format_version}")
    describe(manifest)
    if sequence_length:
        dataset = _open(uri, sequence_length, packing, tails, endpoint_url)
        filled = "" if packing == "stream" else f", packing {packing}"
        typer.echo(f"samples:    {len(dataset):,} of {sequence_length} tokens{filled}")
    if len(manifest.shards) > 20 and not shards:
        typer.echo(f"shards:     {manifest.shards[0].path} to {manifest.shards[-1].path} (--shards lists them)")
        return
    for shard in manifest.shards:
        typer.echo(
            f"shard:      {shard.path}  {counted(shard.tokens, 'token')}  {counted(shard.documents, 'document')}  "
            f"{shard.bytes:,} bytes  {counted(len(shard.batches), 'batch', 'batches')}"
        )


def verify(uri: DataUri, endpoint_url: Endpoint = None) -> None:
    """Read every byte of a data set and compare checksums. Exit code 1 when damage is found.

    Each damage is named on stderr: file, batch, byte range, what was
    expected and what was found.
    """
    from elastic_train.data.manifest import read_manifest
    from elastic_train.data.verify import damages, total_bytes
    from elastic_train.storage.store import Store

    store = Store.open(uri, storage_of(uri, endpoint_url))
    manifest, digest = read_manifest(store)
    total = total_bytes(manifest)
    found = 0
    with progress_bar() as progress:
        task = progress.add_task("verify", total=total)
        for sentence in damages(store, manifest, lambda size: progress.advance(task, size)):
            found += 1
            typer.echo(f"damaged: {sentence}", err=True)
    if found:
        raise typer.Exit(FAILED)
    typer.echo(f"{uri}: {counted(len(manifest.shards), 'shard')}, {total:,} bytes are what manifest {digest[:16]} says")


def show(
    uri: DataUri,
    sample: Annotated[int, typer.Option(min=0, help="Number of the sample, as in the samples of steps.jsonl.")],
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 256,
    packing: PackingOption = "stream",
    tails: TailsOption = None,
    endpoint_url: Endpoint = None,
) -> None:
    """Print the text of a sample, document by document. What is only read, and not to be predicted, is in ⟦ ⟧."""
    dataset = _open(uri, sequence_length, packing, tails, endpoint_url)
    if sample >= len(dataset):
        raise UserError(
            f"--sample {sample}: the data set has {counted(len(dataset), 'sample')} of {sequence_length} tokens"
        )
    for line in _shown(dataset, _tokenizer(uri, dataset, endpoint_url), sample):
        typer.echo(line)


def _open(uri: str, sequence_length: int, packing: str, tails: str | None, endpoint_url: str | None) -> TokenDataset:
    from elastic_train.config.data import DataConfig
    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.dataset import open_dataset

    accepted = {"packing": ("stream", "documents", "none"), "tails": ("keep", "drop", None)}
    for name, value in (("packing", packing), ("tails", tails)):
        if value not in accepted[name]:
            raise UserError(f"--{name} {value}: must be {' or '.join(filter(None, accepted[name]))}")
    settings: dict[str, Any] = {"packing": packing, "tails": tails, "document_mask": True}
    config = DataConfig(uri=uri, sequence_length=sequence_length, **settings)
    return open_dataset(uri, config, storage_of(uri, endpoint_url) or StorageConfig())


def _tokenizer(uri: str, dataset: TokenDataset, endpoint_url: str | None) -> Tokenizer:
    from elastic_train.data.tokenizer import GivenTokenizer, parse_tokenizer
    from elastic_train.storage.store import Store

    text = Store.open(uri, storage_of(uri, endpoint_url)).read(dataset.manifest.tokenizer.path)
    return parse_tokenizer(GivenTokenizer(text, dataset.eos_id))


def _shown(dataset: TokenDataset, tokenizer: Tokenizer, index: int) -> Iterator[str]:
    from elastic_train.data.samples import PADDING_LABEL

    sample, pieces = dataset.sample(index), dataset.pieces(index)
    used = sum(length for _, length in pieces)
    learned = int((sample.labels != PADDING_LABEL).sum())
    documents = int(sample.documents[used - 1]) + 1
    yield (
        f"sample {index} of {len(dataset):,}: {documents} document{'s' * (documents > 1)}, {dataset.sequence_length} "
        f"places, {learned} of them with a label"
    )
    place = 0
    for start, length in pieces:
        tokens = dataset.tokens(start, length + 1).tolist()
        numbers = sample.documents[place : place + length].tolist()
        labels = [PADDING_LABEL, *sample.labels[place : place + length].tolist()]
        # The last token is a label only; it belongs to the document that it is predicted from.
        places = zip(tokens, [*numbers, numbers[-1]], [label != PADDING_LABEL for label in labels], strict=True)
        for number, run in groupby(places, key=lambda each: each[1]):
            own = list(run)
            yield f"--- document {number + 1}, {len(own)} tokens from token {start:,} of the stream"
            yield _text(tokenizer, [(token, is_learned) for token, _, is_learned in own])
            start += len(own)
        place += length
    if used < dataset.sequence_length:
        yield f"--- padding, {dataset.sequence_length - used} places"


def _text(tokenizer: Tokenizer, tokens: list[tuple[int, bool]]) -> str:
    parts = []
    for is_learned, run in groupby(tokens, key=lambda each: each[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        parts.append(text if is_learned else f"⟦{text}⟧")
    return "".join(parts)
