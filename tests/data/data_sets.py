"""Looks at prepared data sets."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from elastic_train.data.corpus import Corpus
from elastic_train.data.manifest import Manifest, read_manifest
from elastic_train.data.parts import cut
from elastic_train.data.scan import judged
from elastic_train.storage.store import Store


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, hidden ones too."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def texts_of(corpus: Corpus) -> list[str]:
    """The texts of the documents that can be used, in order."""
    parts = cut(corpus, 2**20)
    return [each.found.text or "" for part in parts for each in judged(corpus, part, None) if not each.kind]


def decoded(folder: Path) -> list[str]:
    """The documents of a data set, cut at its files of ends."""
    manifest, _ = read_manifest(Store.open(str(folder)))
    tokenizer = Tokenizer.from_file(str(folder / manifest.tokenizer.path))
    texts: list[str] = []
    held: list[int] = []
    for shard in manifest.shards:
        assert shard.ends is not None
        tokens = pa.ipc.open_file((folder / shard.path).read_bytes()).read_all()["tokens"].to_pylist()
        begin = 0
        for end in pa.ipc.open_file((folder / shard.ends.path).read_bytes()).read_all()["ends"].to_pylist():
            held += tokens[begin:end]
            assert held[-1] == manifest.tokenizer.eos_id
            texts.append(tokenizer.decode(held[:-1], skip_special_tokens=False))
            begin, held = end, []
        held += tokens[begin:]
    assert not held
    return texts


def assert_whole(folder: Path) -> Manifest:
    """Every file is there as the manifest says, and there are no others."""
    manifest, _ = read_manifest(Store.open(str(folder)))
    files = contents(folder)
    del files["manifest.json"]
    described = {file.path: file.sha256 for file in (*manifest.shards, manifest.tokenizer)}
    described |= {shard.ends.path: shard.ends.sha256 for shard in manifest.shards if shard.ends is not None}
    if manifest.left_out is not None:
        described[manifest.left_out.path] = manifest.left_out.sha256
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == described
    assert not [path for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())]
    return manifest
