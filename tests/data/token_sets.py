"""Small data sets of random tokens, made without a tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic_train.data.manifest import Manifest, Shard, Tokenizer
from elastic_train.data.shards import NOTHING, Stretch, write_shard
from elastic_train.storage.store import Store

NONE = "0" * 64
Array = np.ndarray[Any, Any]


def make(
    store: Store | str,
    sizes: list[int],
    batch_tokens: int,
    dtype: str = "uint16",
    ends: list[list[int]] | None = None,
    counts: Array | None = None,
    vocabulary: int | None = None,
) -> tuple[Manifest, Array]:
    """A data set of shards of ``sizes`` tokens, and all its tokens.

    ``ends``: of the documents, from the first token of their shard; None: each shard is one. ``counts``: of all tokens.
    ``vocabulary``: entries of the tokenizer; None: as many as ``dtype`` has numbers, or 2^17.
    """
    store = Store.open(store) if isinstance(store, str) else store
    top = vocabulary or (2**16 if dtype == "uint16" else 2**17)
    flat = np.random.default_rng(len(sizes)).integers(0, top, sum(sizes)).astype(dtype)
    shards: list[Shard] = []
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        part = NOTHING if counts is None else counts[start : start + size]
        whole = Stretch(flat[start : start + size], [size] if ends is None else ends[number], part)
        shards.append(write_shard(store, f"shard-{number}", [whole], dtype, batch_tokens, counts is not None))
    manifest = Manifest(
        tokenizer=Tokenizer(path="tokenizer.json", sha256=NONE, vocab_size=top, eos_id=0, eos_token="e"),
        dtype="uint32" if dtype == "uint32" else "uint16",
        labelled=counts is not None,
        tokens=len(flat),
        documents=sum(shard.documents for shard in shards),
        batch_tokens=batch_tokens,
        shards=tuple(shards),
        inputs={},
        inputs_sha256=NONE,
    )
    store.write("manifest.json", [manifest.to_bytes()])
    return manifest, flat
