"""Data sets in object storage, through the cache of a node."""

from __future__ import annotations

import multiprocessing
import secrets
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.storage.store import Store
from tests.data.token_sets import Array, make
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow
SIZES, BATCH = [3000, 2500], 256


@pytest.fixture
def remote(s3_environment: S3Server, s3_bucket: str) -> tuple[str, StorageConfig, Array]:
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    storage = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    _, flat = make(Store.open(uri, storage), SIZES, BATCH)
    return uri, storage, flat


def copies(cache: Path) -> list[Path]:
    return sorted(file for file in cache.glob("?/*"))


def _some_samples(uri: str, storage: StorageConfig, cache: Path, results: Any) -> None:
    dataset = TokenDataset.open(uri, 16, storage, cache)
    results.put([dataset.sample(index).input_ids.tolist() for index in range(0, len(dataset), 7)])


def test_processes_share_one_verified_copy_of_what_they_need(
    remote: tuple[str, StorageConfig, Array], tmp_path: Path
) -> None:
    uri, storage, flat = remote
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_some_samples, args=(uri, storage, tmp_path / "cache", results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    expected = [flat[start : start + 16].tolist() for start in range(0, 16 * ((len(flat) - 1) // 16), 16 * 7)]
    assert found == [expected] * 3
    manifest = TokenDataset.open(uri, 16, storage, tmp_path / "cache").manifest
    assert {file.name for file in copies(tmp_path / "cache")} == {
        f"{shard.sha256[:32]}-{n}" for shard in manifest.shards for n in range(len(shard.batches))
    } | {f"{shard.ends.sha256[:32]}-ends" for shard in manifest.shards if shard.ends is not None}
    store = Store.open(uri, storage)
    for shard in manifest.shards:
        store.delete(shard.path)
    again = TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    assert again.sample(7).input_ids.tolist() == expected[1]  # the copies are enough


def test_only_what_is_needed_is_fetched(remote: tuple[str, StorageConfig, Array], tmp_path: Path) -> None:
    uri, storage, flat = remote
    dataset = TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    assert not copies(tmp_path / "cache")
    assert dataset.tokens(3000 - 20, 40).tolist() == flat[2980:3020].tolist()
    assert len(copies(tmp_path / "cache")) == 2


def test_a_damaged_batch_is_refused_by_name(remote: tuple[str, StorageConfig, Array], tmp_path: Path) -> None:
    uri, storage, flat = remote
    store = Store.open(uri, storage)
    dataset = TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    offset, size = dataset.manifest.shards[1].batches[3]
    data = bytearray(store.read("shard-1"))
    data[offset + size // 2] ^= 1
    store.write("shard-1", [data])
    assert dataset.tokens(3000, 3 * BATCH).tolist() == flat[3000 : 3000 + 3 * BATCH].tolist()
    message = rf"shard {uri}/shard-1 is damaged: batch 3 \(bytes {offset} to {offset + size}\) was read 2 times, xxh3 "
    with pytest.raises(DataError, match=message):
        dataset.tokens(3000 + 3 * BATCH, 1)
    store.write("shard-1", [data[: offset + 10]])
    with pytest.raises(DataError, match=rf"shard {uri}/shard-1 has {offset + 10} bytes, the manifest says {len(data)}"):
        dataset.tokens(3000 + 3 * BATCH, 1)
    store.delete("shard-1")
    with pytest.raises(DataError, match=rf"shard {uri}/shard-1 is missing"):
        dataset.tokens(3000 + 3 * BATCH, 1)


def test_bytes_that_were_spoilt_on_the_way_or_in_the_cache_are_fetched_again(
    remote: tuple[str, StorageConfig, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer for a batch has a bit flipped; later, so has its copy."""
    uri, storage, flat = remote
    whole, answers = type(Store.open(uri, storage)).read, []

    def spoilt(store: Store, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = bytearray(whole(store, path, offset, length))
        if path == "shard-0":
            answers.append(offset)
            data[-1] ^= len(answers) == 1
        return bytes(data)

    monkeypatch.setattr(type(Store.open(uri, storage)), "read", spoilt)
    dataset = TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    assert dataset.tokens(0, 100).tolist() == flat[:100].tolist()
    assert len(answers) == 2 and answers[0] == answers[1]
    (copy,) = copies(tmp_path / "cache")
    spoilt_copy = bytearray(copy.read_bytes())
    spoilt_copy[-1] ^= 1
    copy.write_bytes(spoilt_copy)
    again = TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    assert again.tokens(0, 100).tolist() == flat[:100].tolist()
    assert len(answers) == 3


def test_documents_are_packed_from_small_files(remote: tuple[str, StorageConfig, Array], tmp_path: Path) -> None:
    uri, storage, flat = remote
    dataset = TokenDataset.open(uri, 1024, storage, tmp_path / "cache", packing="documents", tails="keep")
    assert dataset.pieces(0) == [(0, 1024)] and len(dataset) == 3 + 3
    assert dataset.sample(0).labels.tolist() == flat[1:1025].tolist()
