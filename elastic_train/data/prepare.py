"""Text to token shards: train a tokenizer, encode, write shards, and last the manifest that makes them a data set."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import MANIFEST, Manifest, Shard, Skipped, Tokenizer, inputs_digest, read_manifest
from elastic_train.data.shards import write_shard
from elastic_train.data.tokenizer import (
    EOS_ID,
    GivenTokenizer,
    encode_documents,
    parse_tokenizer,
    read_tokenizer,
    sample_documents,
    train_tokenizer,
)
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import tokenizers

    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.corpus import Corpus

    Progress = Callable[[str, int, int], None]
    """Called with (phase, bytes done, bytes in all); phases: read, tokenizer, encode."""

TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 2**26
BATCH_TOKENS = 2**18
SAMPLE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data set in storage. ``reused``: it was there already, made from the same inputs."""

    uri: str
    manifest: Manifest
    digest: str
    reused: bool


def prepare(
    corpus: Corpus,
    out: str,
    vocab_size: int,
    *,
    storage: StorageConfig | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    given: GivenTokenizer | None = None,
    sample_bytes: int = SAMPLE_BYTES,
    shard_tokens: int = SHARD_TOKENS,
    batch_tokens: int = BATCH_TOKENS,
) -> Prepared:
    """Makes the data set of ``corpus`` in the folder ``out`` (local or S3, ``storage`` has the endpoint).

    The same corpus and settings give the same bytes. The tokenizer is ``given``, or is trained on about
    ``sample_bytes`` of the corpus, to have up to ``vocab_size`` entries.
    A folder that holds a data set of the same inputs is reused (made again when shards are missing); one of other
    inputs is refused unless ``overwrite``.
    Raises :class:`DataError` or :class:`~elastic_train.storage.errors.StorageError`.
    """
    report = progress or (lambda phase, done, total: None)
    store = Store.open(out, storage)
    inputs = _inputs(corpus, vocab_size, sample_bytes, shard_tokens, batch_tokens, report)
    if given is not None:
        source = f"given: sha256 {given.sha256}, eos_id {given.eos_id}"
        size = parse_tokenizer(given).get_vocab_size()
        inputs = {**inputs, "tokenizer": source, "vocab_size": size}
    if store.exists(MANIFEST):
        manifest, digest = read_manifest(store)
        if manifest.inputs_sha256 == inputs_digest(inputs) and _is_whole(store, manifest):
            return Prepared(store.uri, manifest, digest, reused=True)
        if not overwrite and manifest.inputs_sha256 != inputs_digest(inputs):
            raise DataError(
                f"{store.uri} holds a data set made from other inputs; choose another folder or allow overwriting"
            )
        store.delete(MANIFEST)  # first, so that a crash leaves no mixture that looks whole
    size = int(inputs["corpus_bytes"])
    report("tokenizer", 0, size)
    if given is None:
        sample = sample_documents(corpus.documents(), size, sample_bytes)
        tokenizer = train_tokenizer(sample, vocab_size)
        given = GivenTokenizer(tokenizer.to_str(pretty=True).encode() + b"\n", EOS_ID)
    else:
        tokenizer = parse_tokenizer(given)
    report("tokenizer", size, size)
    store.write(TOKENIZER, [given.text])
    return _write(store, corpus, tokenizer, _entry(tokenizer, given), inputs, report)


def given_tokenizer(folder: Store) -> GivenTokenizer:
    """That of a prepared data set, or of a Hugging Face model folder. Raises DataError when there is none."""
    if not folder.exists(MANIFEST):
        return read_tokenizer(folder)
    manifest, _ = read_manifest(folder)
    given = GivenTokenizer(folder.read(manifest.tokenizer.path), manifest.tokenizer.eos_id)
    if given.sha256 != manifest.tokenizer.sha256:
        raise DataError(f"{folder.uri}/{manifest.tokenizer.path} has not the sha256 of its manifest")
    return given


def _entry(tokenizer: tokenizers.Tokenizer, given: GivenTokenizer) -> Tokenizer:
    return Tokenizer(
        path=TOKENIZER,
        sha256=given.sha256,
        vocab_size=max(tokenizer.get_vocab().values()) + 1,  # the ids of a given one may have gaps
        eos_id=given.eos_id,
        eos_token=tokenizer.id_to_token(given.eos_id),
    )


def _is_whole(store: Store, manifest: Manifest) -> bool:
    """Whether every shard is there in its size. (Contents are checked by whoever reads them.)"""
    sizes = {entry.path: entry.size for entry in store.list()}
    return manifest.tokenizer.path in sizes and all(sizes.get(shard.path) == shard.bytes for shard in manifest.shards)


def _inputs(corpus: Corpus, vocab_size: int, sample: int, shard: int, batch: int, report: Progress) -> dict[str, Any]:
    """Reads the corpus once for its digest: every document's name and text, in order."""
    digest = hashlib.sha256()
    size, total = 0, corpus.total_bytes()
    for document in corpus.documents():
        name, data = document.name.encode(), document.text.encode()
        digest.update(f"{len(name)} {len(data)} ".encode() + name + data)
        size += len(data)
        report("read", size, total)
    if not size:
        raise DataError(
            f"corpus {corpus.name} has no text: "
            f"{len(corpus.skipped)} of {len(corpus.names)} files are empty or not UTF-8"
        )
    for skipped in corpus.skipped:
        digest.update(f"skipped {skipped.name} {skipped.reason}\n".encode())
    return {
        "corpus": corpus.name,
        "corpus_sha256": digest.hexdigest(),
        "corpus_bytes": size,
        "vocab_size": vocab_size,
        "tokenizer": "byte-level BPE",
        "tokenizer_sample_bytes": sample,
        "shard_tokens": shard,
        "batch_tokens": batch,
    }


def _write(
    store: Store,
    corpus: Corpus,
    tokenizer: tokenizers.Tokenizer,
    entry: Tokenizer,
    inputs: dict[str, Any],
    report: Progress,
) -> Prepared:
    dtype = "uint16" if entry.vocab_size <= 2**16 else "uint32"
    shards: list[Shard] = []
    encoded = encode_documents(tokenizer, corpus.documents(), dtype, entry.eos_id)
    for tokens, ends in _shards(encoded, inputs, report):
        shards.append(write_shard(store, f"shard-{len(shards):05d}.arrow", tokens, ends, inputs["batch_tokens"]))
    manifest = Manifest(
        tokenizer=entry,
        dtype="uint16" if dtype == "uint16" else "uint32",
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        batch_tokens=inputs["batch_tokens"],
        shards=tuple(shards),
        inputs=inputs,
        inputs_sha256=inputs_digest(inputs),
        skipped=tuple(Skipped(name=item.name, reason=item.reason) for item in corpus.skipped),
    )
    store.write(MANIFEST, [manifest.to_bytes()])
    return Prepared(store.uri, manifest, hashlib.sha256(manifest.to_bytes()).hexdigest(), reused=False)


def _shards(
    encoded: Iterator[tuple[np.ndarray[Any, Any], int]], inputs: dict[str, Any], report: Progress
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """(tokens of a full shard, ends of the documents in it), cut at exactly ``shard_tokens``."""
    parts: list[np.ndarray[Any, Any]] = []
    ends: list[int] = []
    held = done = 0
    for tokens, size in encoded:
        done += size
        report("encode", done, inputs["corpus_bytes"])
        while held + len(tokens) >= inputs["shard_tokens"]:
            room = inputs["shard_tokens"] - held
            if room == len(tokens):
                ends.append(inputs["shard_tokens"])
            yield np.concatenate([*parts, tokens[:room]]), np.array(ends, np.uint64)
            parts, held, ends, tokens = [], 0, [], tokens[room:]
        if len(tokens):
            parts.append(tokens)
            held += len(tokens)
            ends.append(held)
    if parts:
        yield np.concatenate(parts), np.array(ends, np.uint64)
