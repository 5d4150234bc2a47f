from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from tokenizers import Tokenizer

from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import inputs_digest, parse_manifest
from elastic_train.data.shards import write_shard
from elastic_train.data.verify import damages
from elastic_train.storage.store import Store

FORMAT_1 = Path(__file__).parent / "format_1"
"""Made from three files by the last version that wrote format 1."""


def test_format_1_is_read() -> None:
    dataset = TokenDataset.open(str(FORMAT_1), 4)
    manifest = dataset.manifest
    assert (manifest.format_version, manifest.tokens, manifest.documents, manifest.labelled) == (1, 30, 2, False)
    assert [(shard.checksums, shard.ends) for shard in manifest.shards] == [((), None)] * 2
    assert [(item.name, item.reason) for item in manifest.skipped] == [("empty.txt", "empty")]
    assert manifest.left_out_documents == 1
    assert inputs_digest(manifest.inputs) == manifest.inputs_sha256
    assert list(damages(Store.open(str(FORMAT_1)), manifest)) == []
    tokens = dataset.tokens(0, 30).tolist()
    tokenizer = Tokenizer.from_file(str(FORMAT_1 / "tokenizer.json"))
    assert tokenizer.decode(tokens, skip_special_tokens=False).split("<|endoftext|>") == [
        "one two three\n",
        "grüß dich, one two\n",
        "",
    ]


def test_a_shard_is_described_to_the_byte(tmp_path: Path) -> None:
    tokens = np.arange(50, dtype=np.uint32)
    counts = (tokens % 3 == 0).astype(np.uint8)
    shard = write_shard(Store.open(str(tmp_path)), "deep/a.arrow", tokens, np.array([7, 50], np.uint64), 20, counts)
    data = (tmp_path / "deep/a.arrow").read_bytes()
    assert (shard.tokens, shard.documents, shard.bytes) == (50, 2, len(data))
    assert shard.sha256 == hashlib.sha256(data).hexdigest()
    schema = pa.schema([("tokens", pa.uint32()), ("counts", pa.uint8())])
    batches = []
    for (offset, size), checksum in zip(shard.batches, shard.checksums, strict=True):
        message = data[offset : offset + size]
        assert xxhash.xxh3_64_hexdigest(message) == checksum
        batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(message), schema))
    assert [batch.num_rows for batch in batches] == [20, 20, 10]
    table = pa.Table.from_batches(batches)
    assert table["tokens"].to_pylist() == tokens.tolist() and table["counts"].to_pylist() == counts.tolist()
    assert shard.ends is not None and shard.ends.path == "deep/a.ends.arrow"
    ends = (tmp_path / shard.ends.path).read_bytes()
    assert (shard.ends.bytes, shard.ends.sha256) == (len(ends), hashlib.sha256(ends).hexdigest())
    assert pa.ipc.open_file(ends).read_all().to_pydict() == {"ends": [7, 50]}


def test_a_shard_in_which_no_document_ends_has_an_empty_file_of_ends(tmp_path: Path) -> None:
    shard = write_shard(Store.open(str(tmp_path)), "a.arrow", np.ones(3, np.uint16), np.array([], np.uint64), 20)
    assert shard.documents == 0 and shard.ends is not None
    table = pa.ipc.open_file((tmp_path / shard.ends.path).read_bytes()).read_all()
    assert table.schema == pa.schema([("ends", pa.uint64())]) and table.num_rows == 0


def _format_2(tmp_path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((FORMAT_1 / "manifest.json").read_text())
    manifest |= {"format_version": 2, "tokens": 3, "documents": 1}
    shard = write_shard(Store.open(str(tmp_path)), "a.arrow", np.ones(3, np.uint16), np.array([3], np.uint64), 8)
    manifest["shards"] = [json.loads(shard.model_dump_json())]
    return manifest


def test_format_2_needs_checksums_and_ends(tmp_path: Path) -> None:
    whole = _format_2(tmp_path)
    assert parse_manifest(json.dumps(whole).encode(), "m").shards[0].documents == 1
    for change, message in (
        (
            {"ends": None},
            "m is not a manifest of format 1 or 2: file: .*shard a.arrow has 1 checksums for 1 batches and no",
        ),
        ({"checksums": []}, "shard a.arrow has 0 checksums for 1 batches and a file of ends; format 2 has one of each"),
        ({"checksums": ["xyz"]}, "shards.0.checksums.0: "),
        ({"documents": 2}, "documents=1, but the shards have 2"),
    ):
        damaged = whole | {"shards": [whole["shards"][0] | change]}
        with pytest.raises(DataError, match=message):
            parse_manifest(json.dumps(damaged).encode(), "m")
