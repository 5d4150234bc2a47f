from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from elastic_train.data import verify
from elastic_train.data.manifest import read_manifest
from elastic_train.data.verify import damages, total_bytes
from elastic_train.storage.store import Store
from tests.data.token_sets import make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two shards of five and two batches, and a tokenizer that is one by its sha256."""
    manifest, _ = make(str(tmp_path), [1000, 350], 200)
    (tmp_path / "tokenizer.json").write_bytes(b"tokenizer")
    sha256 = hashlib.sha256(b"tokenizer").hexdigest()
    made = manifest.model_copy(update={"tokenizer": manifest.tokenizer.model_copy(update={"sha256": sha256})})
    (tmp_path / "manifest.json").write_bytes(made.to_bytes())
    return tmp_path


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
