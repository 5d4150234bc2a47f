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
from elastic_train.data.manifest import Shard, inputs_digest, parse_manifest
from elastic_train.data.shards import Stretch, write_shard
from elastic_train.data.verify import damages
from elastic_train.storage.store import Store
from tests.data.token_sets import make

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
    cuts = [Stretch(tokens[:5], [], counts[:5]), Stretch(tokens[5:33], [2], counts[5:33])]
    stretches = [*cuts, Stretch(tokens[33:], [17], counts[33:])]
    shard = write_shard(Store.open(str(tmp_path)), "deep/a.arrow", stretches, "uint32", 20, labelled=True)
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
    shard = write_shard(Store.open(str(tmp_path)), "a.arrow", [Stretch(np.ones(3, np.uint16), [])], "uint16", 20)
    assert shard.documents == 0 and shard.ends is not None
    table = pa.ipc.open_file((tmp_path / shard.ends.path).read_bytes()).read_all()
    assert table.schema == pa.schema([("ends", pa.uint64())]) and table.num_rows == 0


def _format_2(tmp_path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((FORMAT_1 / "manifest.json").read_text())
    manifest |= {"format_version": 2, "tokens": 3, "documents": 1}
    shard = write_shard(Store.open(str(tmp_path)), "a.arrow", [Stretch(np.ones(3, np.uint16), [3])], "uint16", 8)
    manifest["shards"] = [json.loads(shard.model_dump_json())]
    return manifest


def test_format_2_is_read_and_needs_checksums_and_ends(tmp_path: Path) -> None:
    whole = _format_2(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(whole))
    dataset = TokenDataset.open(str(tmp_path), 2)
    assert dataset.manifest.shards[0].documents == 1 and dataset.sample(0).input_ids.tolist() == [1, 1]
    for change, message in (
        (
            {"ends": None},
            "m is not a manifest of format 1, 2 or 3: file: .*shard a.arrow has 1 checksums for 1 batches and no",
        ),
        (
            {"checksums": []},
            "shard a.arrow has 0 checksums for 1 batches and a file of ends; there must be one of each",
        ),
        ({"checksums": ["xyz"]}, "shards.0.checksums.0: "),
        ({"documents": 2}, "documents=1, but the shards have 2"),
    ):
        damaged = whole | {"shards": [whole["shards"][0] | change]}
        with pytest.raises(DataError, match=message):
            parse_manifest(json.dumps(damaged).encode(), "m")


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """Of a manifest of format 3 with three shards."""
    make(str(tmp_path), [30, 20, 40], 16)
    return (tmp_path / "manifest.json").read_bytes().split(b"\n")


def test_format_3_is_json_with_a_line_for_each_shard(lines: list[bytes]) -> None:
    manifest = json.loads(b"\n".join(lines))
    assert manifest["format_version"] == 3 and manifest["shard_tokens"] == [30, 20, 40]
    assert [json.loads(line.rstrip(b",")) for line in lines[-6:-3]] == manifest["shards"]
    assert [shard["batches"][0][1] > 0 for shard in manifest["shards"]] == [True] * 3
    parsed = parse_manifest(b"\n".join(lines), "m")
    assert parsed.to_bytes() == b"\n".join(lines) and parsed.shard_ends() == [30, 50, 90]
    assert parsed.shards[-1] == parsed.shards[1:][1] and [shard.tokens for shard in parsed.shards] == [30, 20, 40]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"documents":1', b'"documents":-1', "documents: Input should be greater than or equal to 0"),
        (b'"tokens":20', b'"tokens":21', "tokens=21, but shard_tokens has 20"),
        (b'"checksums":["', b'"checksums":["0123456789abcdef","', "has 3 checksums for 2 batches and a file of ends"),
        (b'"batches":[[', b'"batches":[[0,1],[', "lists 3 batches, its 20 tokens need 2"),
        (b'{"path"', b'"path"', "file: Invalid JSON"),
    ],
)
def test_a_damaged_line_is_named_when_its_shard_is_needed(
    lines: list[bytes], old: bytes, new: bytes, message: str, tmp_path: Path
) -> None:
    number = next(n for n, line in enumerate(lines) if b"shard-1" in line)
    changed = lines[number].replace(old, new, 1)
    assert changed != lines[number]
    (tmp_path / "manifest.json").write_bytes(b"\n".join([*lines[:number], changed, *lines[number + 1 :]]))
    dataset = TokenDataset.open(str(tmp_path), 4)
    dataset.sample(0)
    message = rf"{tmp_path}/manifest.json, line {number + 1}: .*{message}"
    with pytest.raises(DataError, match=message):
        dataset.tokens(30, 1)
    with pytest.raises(DataError, match=message):
        list(damages(Store.open(str(tmp_path)), dataset.manifest))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"tokens": 90', b'"tokens": 91', "shard_tokens has 90 tokens in 3 shards, it is said to have 91 in 3"),
        (b"  30,\n", b"", "shard_tokens has 60 tokens in 2 shards, it is said to have 90 in 3"),
        (b'"shard_tokens"', b'"shards_tokens"', "Input should be a valid list"),
        (b'"tokens": 90', b'"tokens": 90, "more": 1', "more: Extra inputs are not permitted"),
        (b"\n ]\n}\n", b"\n ]\n", "it has no lines of shards, or not all of them"),
        (b'"dtype": "uint16"', b'"dtype": "int8"', "dtype: Input should be 'uint16' or 'uint32'"),
        (b'"format_version": 3', b'"format_version": 0', "format_version: Input should be 1, 2 or 3"),
        (b'"inputs": {}', b'"inputs": {', "key must be a string at line 17 column 13"),
    ],
)
def test_a_damaged_head_is_refused_at_once(lines: list[bytes], old: bytes, new: bytes, message: str) -> None:
    whole = b"\n".join(lines)
    assert old in whole
    with pytest.raises(DataError, match=rf"^m is not a manifest of format 1, 2 or 3: .*{message}"):
        parse_manifest(whole.replace(old, new, 1), "m")


def test_documents_that_do_not_add_up_are_found_by_verify(lines: list[bytes], tmp_path: Path) -> None:
    whole = b"\n".join(lines).replace(b'"documents": 3', b'"documents": 4')
    manifest = parse_manifest(whole, "m")
    assert f"{tmp_path}/manifest.json says documents=4, but its shards have 3" in list(
        damages(Store.open(str(tmp_path)), manifest)
    )


def test_opening_looks_at_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a sample looks at the one or two that it is in."""
    make(str(tmp_path), [40] * 50, 16)
    looked: list[bytes] = []
    parse = Shard.model_validate_json
    monkeypatch.setattr(Shard, "model_validate_json", lambda line: looked.append(line) or parse(line))
    dataset = TokenDataset.open(str(tmp_path), 10)
    assert len(dataset) == 199 and looked == []
    for index in (80, 83, 81):  # sample 83 goes over into the next shard
        dataset.sample(index)
    assert len(looked) == 2
