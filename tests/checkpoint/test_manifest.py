from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from elastic_train.checkpoint.catalog import Commit, commit, list_checkpoints, load_manifest
from elastic_train.checkpoint.errors import CheckpointError
from elastic_train.checkpoint.manifest import (
    CheckpointId,
    Manifest,
    TensorRecord,
    UploadedObject,
    attempt_of,
    merge,
    object_path,
)
from elastic_train.config.operation import StorageConfig
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, first_claim, save
from tests.s3_server import S3Server


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    states = even_layout({"a": torch.arange(6.0), "b": torch.ones(3, 2)}, 2)
    return save(Store.open(str(tmp_path / "job")), tmp_path, states, step=50, generation=3)


@pytest.fixture
def store(tmp_path: Path, manifest: Manifest) -> Store:
    return Store.open(str(tmp_path / "job"))


def test_paths() -> None:
    assert object_path(50, 3, 2) == "checkpoints/step-00000050-g3/rank-00002.bin"
    assert CheckpointId(50, 1).path == "checkpoints/step-00000050-c1.json"
    assert CheckpointId.of("checkpoints/step-00000050-c1.json") == CheckpointId(50, 1)
    assert CheckpointId.of("checkpoints/step-123456789-c12.json") == CheckpointId(123456789, 12)
    assert CheckpointId.of("checkpoints/step-00000050-g3/rank-00002.bin") is None
    assert attempt_of("checkpoints/step-00000050-g3/rank-00002.bin") == (50, 3)
    assert attempt_of("checkpoints/step-00000050-c1.json") is None


def test_json_gives_the_same_manifest_back(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(manifest.to_json()).to_json() == manifest.to_json()


def test_what_a_manifest_says(manifest: Manifest, store: Store) -> None:
    path = object_path(50, 3, 0)
    assert manifest.objects == {path: 28, object_path(50, 3, 1): 20}
    record = manifest.tensors["b"]
    assert (record.dtype, record.shape) == ("float32", (3, 2))
    assert [(c.offsets, c.sizes, c.object, c.byte_offset, c.nbytes) for c in record.chunks] == [
        ((0, 0), (2, 2), path, 12, 16),
        ((2, 0), (1, 2), object_path(50, 3, 1), 12, 8),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 1}, "format_version"),
        ({"block_bytes": 4}, "has 1 checksums for"),
        ({"step": 51}, "does not belong to step 51 of generation 3"),
        ({"objects": {}}, "lies outside object"),
        ({"objects": {"steps.jsonl": 10}}, "object steps.jsonl does not belong"),
        ({"extra": 1}, "extra"),
        ({"cursor": -1}, "cursor"),
    ],
)
def test_what_is_no_manifest_is_refused(manifest: Manifest, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Manifest.from_json(sealed(json.loads(manifest.to_json())["manifest"] | change))


def sealed(manifest: dict[str, Any]) -> bytes:
    """A manifest's JSON with the right checksum."""
    body = json.dumps(manifest)
    return f'{{"manifest":{body},"xxh3":"{xxhash.xxh3_64_hexdigest(body.encode())}"}}'.encode()


def test_every_flipped_byte_and_every_missing_end_of_a_manifest_is_noticed(manifest: Manifest) -> None:
    text = manifest.to_json()
    for place in range(len(text)):
        flipped = bytearray(text)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(CheckpointError, match="not a whole manifest"):
            Manifest.from_json(bytes(flipped))
        with pytest.raises(CheckpointError, match="not a whole manifest"):
            Manifest.from_json(text[:place])


def test_a_commit_creates_the_checkpoint_once(store: Store, manifest: Manifest) -> None:
    assert list_checkpoints(store) == []
    assert commit(store, manifest, first_claim(store)) == Commit(True, manifest)
    assert commit(store, manifest, first_claim(store)) == Commit(False, manifest)
    assert load_manifest(store, 50) == manifest
    assert list_checkpoints(store) == [50]


def test_a_second_attempt_at_a_committed_step_changes_nothing(store: Store, manifest: Manifest, tmp_path: Path) -> None:
    commit(store, manifest, first_claim(store))
    before = {entry.path: store.read(entry.path) for entry in store.list()}
    other = save(store, tmp_path, even_layout({"a": torch.zeros(6), "b": torch.zeros(3, 2)}, 1), step=50, generation=4)
    assert commit(store, other, first_claim(store)) == Commit(False, manifest)
    after = {entry.path: store.read(entry.path) for entry in store.list()}
    assert {path: after[path] for path in before} == before


def test_a_missing_checkpoint_is_an_error_that_names_the_object_and_what_there_is(
    store: Store, manifest: Manifest
) -> None:
    commit(store, manifest, first_claim(store))
    with pytest.raises(
        CheckpointError, match=r"checkpoints/step-00000060-c\*\.json is missing in .*; committed steps: 50"
    ):
        load_manifest(store, 60)


def test_an_unreadable_manifest_is_an_error_that_names_the_object(store: Store) -> None:
    store.write(CheckpointId(60, 1).path, [b"{"])
    with pytest.raises(CheckpointError, match=r"checkpoints/step-00000060-c1\.json in .* is not a whole manifest"):
        load_manifest(store, 60)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    for step in (1000, 999, 99999999, 100000000, 5):
        store.write(CheckpointId(step, 1).path, [b""])
    store.write("checkpoints/step-99999998-g1/rank-00000.bin", [b""])
    store.write("checkpoints/step-7.json.tmp", [b""])
    store.write("checkpoints/notes.json", [b""])
    assert list_checkpoints(store) == [5, 999, 1000, 99999999, 100000000]


def test_ranks_that_disagree_about_a_tensor_cannot_be_merged() -> None:
    uploads = [
        UploadedObject(path=f"o{n}", nbytes=0, tensors={"w": TensorRecord(dtype="float32", shape=(n,), chunks=())})
        for n in (4, 5)
    ]
    with pytest.raises(CheckpointError, match=r"o5 has w as float32 \(5,\); others have float32 \(4,\)"):
        merge(uploads)


def race(stores: list[Store], manifests: list[Manifest]) -> list[Commit]:
    """Commits all at once; the outcomes in the order of ``manifests``."""
    outcomes: dict[int, Commit] = {}
    claim = first_claim(stores[0])
    start = threading.Barrier(len(manifests))

    def run(index: int) -> None:
        start.wait()
        outcomes[index] = commit(stores[index], manifests[index], claim)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(manifests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[index] for index in range(len(manifests))]


def check_one_winner(stores: list[Store], outcomes: list[Commit], manifests: list[Manifest]) -> None:
    winners = [index for index, outcome in enumerate(outcomes) if outcome.created]
    assert len(winners) == 1
    assert all(outcome.manifest == manifests[winners[0]] for outcome in outcomes)
    assert all(load_manifest(store, manifests[0].step) == manifests[winners[0]] for store in stores)


def contenders(manifest: Manifest, step: int) -> list[Manifest]:
    """Eight different manifests of one step."""
    return [manifest.model_copy(update={"step": step, "objects": {}, "tensors": {}, "seed": seed}) for seed in range(8)]


def test_of_eight_commits_at_once_one_wins_on_a_file_system(manifest: Manifest, tmp_path: Path) -> None:
    stores = [Store.open(str(tmp_path / "race")) for _ in range(8)]
    for step in range(25):
        manifests = contenders(manifest, step)
        check_one_winner(stores, race(stores, manifests), manifests)


@pytest.mark.slow
def test_of_eight_commits_at_once_one_wins_on_s3(manifest: Manifest, s3_environment: S3Server) -> None:
    bucket = s3_environment.create_bucket("commit-race")
    config = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    stores = [Store.open(f"s3://{bucket}/job", config) for _ in range(8)]
    for step in range(5):
        manifests = contenders(manifest, step)
        check_one_winner(stores, race(stores, manifests), manifests)
