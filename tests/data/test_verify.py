from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from elastic_train.data import verify
from elastic_train.data.manifest import Manifest, read_manifest
from elastic_train.data.tokenizer import EOS, GivenTokenizer, number_of_entries, train_tokenizer
from elastic_train.data.verify import damages, total_bytes
from elastic_train.storage.store import Store
from tests.data.token_sets import make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two shards of five and two batches, and a tokenizer."""
    manifest, _ = make(str(tmp_path), [1000, 350], 200)
    text = train_tokenizer(["a b"], 300).to_str().encode()
    (tmp_path / "tokenizer.json").write_bytes(text)
    sha256, entries = hashlib.sha256(text).hexdigest(), number_of_entries(GivenTokenizer(text, 0))
    write(tmp_path, manifest, {"sha256": sha256, "vocab_size": entries, "eos_token": EOS})
    return tmp_path


def write(folder: Path, manifest: Manifest, tokenizer: dict[str, Any]) -> None:
    """The manifest, with other fields of its tokenizer."""
    made = manifest.model_copy(update={"tokenizer": manifest.tokenizer.model_copy(update=tokenizer)})
    (folder / "manifest.json").write_bytes(made.to_bytes())


def found(data: Path) -> list[str]:
    store = Store.open(str(data))
    sizes: list[int] = []
    sentences = list(damages(store, read_manifest(store)[0], sizes.append))
    if not sentences:
        assert sum(sizes) == total_bytes(read_manifest(store)[0])
    return sentences


@pytest.mark.parametrize("block", [7, 1000, 8 * 2**20])
def test_every_damaged_batch_is_named_whatever_is_read_at_a_time(
    data: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(verify, "BLOCK", block)
    assert found(data) == []
    shard = read_manifest(Store.open(str(data)))[0].shards[0]
    file = data / shard.path
    whole = bytearray(file.read_bytes())
    for number in (1, 4):
        offset, size = shard.batches[number]
        whole[offset + size - 1] ^= 1
    file.write_bytes(whole)
    named = [f"shard {file} is damaged: batch {n} (bytes {o} to {o + s}), xxh3 " for n, (o, s) in
             enumerate(shard.batches) if n in (1, 4)]  # fmt: skip
    assert [sentence.partition("xxh3 ")[0] + "xxh3 " for sentence in found(data)] == named


def test_bytes_that_are_spoilt_on_the_way_are_no_damage(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, answers = type(Store.open(str(data))).read, []

    def spoilt(store: Store, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = bytearray(whole(store, path, offset, length))
        if path == "shard-0":
            answers.append(offset)
            data[len(data) // 2] ^= len(answers) == 1
        return bytes(data)

    monkeypatch.setattr(type(Store.open(str(data))), "read", spoilt)
    assert found(data) == []
    assert len(answers) == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"vocab_size": 256}, "says tokenizer.vocab_size=256, but the tokenizer has 258 entries"),
        ({"eos_id": 5}, f"says tokenizer.eos_id=5 and eos_token={EOS}, but entry 5 is %"),
        ({"eos_id": 9999}, "tokenizer.json has no entry 9999, which shall end documents"),
    ],
)
def test_what_the_manifest_says_of_the_tokenizer_is_compared(data: Path, fields: dict[str, Any], sentence: str) -> None:
    write(data, read_manifest(Store.open(str(data)))[0], fields)
    (told,) = found(data)
    assert told.endswith(sentence)
