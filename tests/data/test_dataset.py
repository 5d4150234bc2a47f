from __future__ import annotations

import hashlib
import multiprocessing
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.config.operation import StorageConfig
from elastic_train.data.corpus import open_corpus
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Manifest, Shard, Tokenizer, read_manifest
from elastic_train.data.prepare import prepare
from elastic_train.data.shards import decode_batch, write_shard
from elastic_train.storage.store import Store
from tests.s3_server import S3Server

NONE = "0" * 64


def make(
    folder: Path, sizes: list[int], batch_tokens: int, dtype: str = "uint16"
) -> tuple[Manifest, np.ndarray[Any, Any]]:
    """A data set of shards of the given sizes and all its tokens."""
    top = 2**16 if dtype == "uint16" else 2**17
    flat = np.random.default_rng(len(sizes)).integers(0, top, sum(sizes)).astype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Shard] = []
    for number, size in enumerate(sizes):
        start, name = sum(sizes[:number]), f"shard-{number}"
        ends = np.array([size], np.uint64)
        shards.append(write_shard(Store.open(str(folder)), name, flat[start : start + size], ends, batch_tokens))
    manifest = Manifest(
        tokenizer=Tokenizer(path="tokenizer.json", sha256=NONE, vocab_size=top, eos_id=0, eos_token="e"),
        dtype="uint32" if dtype == "uint32" else "uint16",
        tokens=len(flat),
        documents=len(sizes),
        batch_tokens=batch_tokens,
        shards=tuple(shards),
        inputs={},
        inputs_sha256=NONE,
    )
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return manifest, flat


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from(["uint16", "uint32"]),
)
def test_samples_are_the_flat_stream_across_all_borders(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch_tokens: int, length: int, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("set")
    _, flat = make(folder, sizes, batch_tokens, dtype)
    dataset = TokenDataset.open(str(folder), length)
    assert len(dataset) == (len(flat) - 1) // length
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        assert sample.dtype == np.int64
        assert sample.tolist() == flat[index * length : index * length + length + 1].tolist()
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {outside} is outside"):
            dataset.sample(outside)


def test_one_ranged_read_fetches_one_batch(tmp_path: Path) -> None:
    manifest, flat = make(tmp_path, [1000, 77], 300)
    store = Store.open(str(tmp_path))
    read = [
        decode_batch(store.read(shard.path, offset, size), manifest.dtype)
        for shard in manifest.shards
        for offset, size in shard.batches
    ]
    assert [len(batch) for batch in read] == [300, 300, 300, 100, 77]
    assert np.concatenate(read).tolist() == flat.tolist()


def test_the_digest_is_that_of_the_manifest_file(tmp_path: Path) -> None:
    make(tmp_path, [50], 20)
    dataset = TokenDataset.open(str(tmp_path), 8)
    assert dataset.digest == hashlib.sha256((tmp_path / "manifest.json").read_bytes()).hexdigest()
    assert dataset.vocab_size == 2**16


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no manifest.json; prepare the data set with `elastic-train data prepare`"
    ):
        TokenDataset.open(str(tmp_path), 8)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"format_version": 2', '"format_version": 3', "format_version"),
        ('"tokens": 70,', '"tokens": 71,', "file"),
        ("{", "[", "file"),
    ],
)
def test_a_manifest_that_is_wrong_is_named_with_the_field(tmp_path: Path, old: str, new: str, place: str) -> None:
    make(tmp_path, [50, 20], 20)
    text = (tmp_path / "manifest.json").read_text()
    assert old in text
    (tmp_path / "manifest.json").write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=rf"manifest.json is not a manifest of format 1 or 2: {place}: "):
        TokenDataset.open(str(tmp_path), 8)


def test_a_token_that_the_tokenizer_does_not_have_is_never_given_out(tmp_path: Path) -> None:
    """Sizes are right and nothing was hashed, as where a disk has lost a block."""
    manifest, flat = make(tmp_path, [50, 50], batch_tokens=20)
    limit = int(flat[:70].max()) + 1
    flat[70] = 2**16 - 1
    shard = write_shard(Store.open(str(tmp_path)), "shard-1", flat[50:], np.array([50], np.uint64), 20)
    small = manifest.tokenizer.model_copy(update={"vocab_size": limit})
    damaged = manifest.model_copy(update={"tokenizer": small, "shards": (manifest.shards[0], shard)})
    dataset = TokenDataset(damaged, NONE, [tmp_path / "shard-0", tmp_path / "shard-1"], 10)
    assert dataset.tokens(0, 70).tolist() == flat[:70].tolist()
    message = f"{tmp_path}/shard-1 has the token 65535, the tokenizer only {limit}: it is damaged"
    with pytest.raises(DataError, match=message):
        dataset.sample(6)  # tokens 60 to 70


def test_damaged_local_shards_are_named(tmp_path: Path) -> None:
    manifest, _ = make(tmp_path, [50, 30], 20)
    file = tmp_path / "shard-1"
    whole = file.read_bytes()
    TokenDataset.open(str(tmp_path), 8).verify()
    offset, size = manifest.shards[1].batches[0]
    file.write_bytes(whole[: offset + size - 1] + bytes([whole[offset + size - 1] ^ 1]) + whole[offset + size :])
    with pytest.raises(DataError, match=r"shard .*/shard-1 is damaged: sha256 .*, the manifest says"):
        TokenDataset.open(str(tmp_path), 8).verify()
    file.write_bytes(whole[:-1])
    with pytest.raises(
        DataError, match=rf"shard .*/shard-1 has {len(whole) - 1} bytes, the manifest says {len(whole)}"
    ):
        TokenDataset.open(str(tmp_path), 8)
    file.unlink()
    with pytest.raises(DataError, match=r"shard .*/shard-1 is missing"):
        TokenDataset.open(str(tmp_path), 8)


def test_too_few_tokens_for_one_sample(tmp_path: Path) -> None:
    make(tmp_path, [8], 20)
    assert len(TokenDataset.open(str(tmp_path), 8)) == 0
    assert len(TokenDataset.open(str(tmp_path), 7)) == 1


@pytest.fixture
def remote(text_folder: Path, s3_environment: S3Server, s3_bucket: str) -> tuple[str, StorageConfig]:
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    storage = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    prepare(open_corpus(str(text_folder)), uri, 300, storage=storage, shard_tokens=3000, batch_tokens=256)
    return uri, storage


def _first_sample(uri: str, storage: StorageConfig, cache: Path, results: Any) -> None:
    results.put(TokenDataset.open(uri, 16, storage, cache).sample(0).tolist())


@pytest.mark.slow
def test_processes_share_one_verified_copy(remote: tuple[str, StorageConfig], tmp_path: Path) -> None:
    uri, storage = remote
    cache = tmp_path / "cache"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_first_sample, args=(uri, storage, cache, results)) for _ in range(3)]
    for process in processes:
        process.start()
    samples = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    dataset = TokenDataset.open(uri, 16, storage, cache)
    assert samples == [dataset.sample(0).tolist()] * 3
    dataset.verify()
    copies = sorted(file.name for file in cache.iterdir() if file.suffix != ".lock")
    assert copies == sorted(f"{shard.sha256}.arrow" for shard in dataset.manifest.shards)
    store = Store.open(uri, storage)
    for shard in dataset.manifest.shards:
        store.delete(shard.path)
    assert TokenDataset.open(uri, 16, storage, cache).sample(0).tolist() == samples[0]  # the copies are enough


@pytest.mark.slow
def test_a_damaged_remote_shard_is_refused_by_name(remote: tuple[str, StorageConfig], tmp_path: Path) -> None:
    uri, storage = remote
    store = Store.open(uri, storage)
    path = read_manifest(store)[0].shards[1].path
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, [data])
    with pytest.raises(DataError, match=rf"shard {uri}/{path} is damaged: fetched 4 times, sha256 "):
        TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    store.write(path, [data[:-1]])
    with pytest.raises(DataError, match=rf"shard {uri}/{path} has {len(data) - 1} bytes, the manifest says"):
        TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.startswith(".tmp")]


@pytest.mark.slow
def test_a_truncated_copy_is_fetched_again(remote: tuple[str, StorageConfig], tmp_path: Path) -> None:
    uri, storage = remote
    dataset = TokenDataset.open(uri, 16, storage, tmp_path / "cache")
    wanted = dataset.sample(3).tolist()
    del dataset
    for file in (tmp_path / "cache").glob("*.arrow"):
        file.write_bytes(file.read_bytes()[:100])
    assert TokenDataset.open(uri, 16, storage, tmp_path / "cache").sample(3).tolist() == wanted


def test_reading_imports_no_pandas(text_folder: Path, tmp_path: Path) -> None:
    """Each new trainer would pay half a second for it."""
    prepare(open_corpus(str(text_folder)), str(tmp_path / "data"), 300)
    program = (
        "import sys; from elastic_train.data.dataset import TokenDataset; "
        f"TokenDataset.open({str(tmp_path / 'data')!r}, 8).sample(0); "
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
