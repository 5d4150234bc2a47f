from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk, RestoreError
from elastic_train.checkpoint.manifest import object_path
from elastic_train.checkpoint.restore_checkpoint import parts_of, restore_from_checkpoint
from elastic_train.config.operation import StorageConfig
from elastic_train.storage.store import Store
from tests.checkpoint.states import emptied, even_layout, same, save_and_commit, some_tensors
from tests.s3_server import S3Server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def flip(store: Store, path: str, at: int) -> None:
    content = bytearray(store.read(path))
    content[at] ^= 1
    store.write(path, [content])


def test_the_newest_is_loaded_into_another_layout(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 3), step)
    for rank, wanted in enumerate(even_layout(some_tensors(20), 2, dim=1)):
        target = emptied(wanted)
        loaded = restore_from_checkpoint(target, store, rank=rank, expected_keys=wanted.keys())
        assert loaded is not None
        assert (loaded.manifest.step, loaded.refused) == (20, [])
        assert same(target, wanted)


def test_an_empty_job_folder_has_nothing_to_load(store: Store) -> None:
    assert restore_from_checkpoint({}, store) is None


def test_damage_found_while_loading_falls_back_to_the_previous_and_says_so(store: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 3), step)
    flip(store, object_path(30, 1, 1), 7)
    store.write(object_path(20, 1, 2), [b"short"])
    wanted = even_layout(some_tensors(10), 1)[0]
    target = emptied(wanted)
    loaded = restore_from_checkpoint(target, store)
    assert loaded is not None
    assert loaded.manifest.step == 10
    assert same(target, wanted)
    assert len(loaded.refused) == 2
    assert f"step 30 is damaged: object {object_path(30, 1, 1)}" in loaded.refused[0]
    assert f"step 20 is damaged: object {object_path(20, 1, 2)}" in loaded.refused[1]


def test_a_step_that_was_asked_for_is_loaded_or_an_error(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 2), step)
    wanted = even_layout(some_tensors(10), 1)[0]
    target = emptied(wanted)
    restore_from_checkpoint(target, store, step=10)
    assert same(target, wanted)
    flip(store, object_path(10, 1, 0), 3)
    with pytest.raises(DamagedChunk, match=object_path(10, 1, 0)):
        restore_from_checkpoint(target, store, step=10)
    with pytest.raises(CheckpointError, match="step 15 has no committed checkpoint"):
        restore_from_checkpoint(target, store, step=15)


def test_when_none_can_be_loaded_the_error_lists_why(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 1), step)
    flip(store, object_path(20, 1, 0), 7)
    store.delete(object_path(10, 1, 0))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded: .*step 20 .*; .*step 10 "):
        restore_from_checkpoint(emptied(even_layout(some_tensors(10), 1)[0]), store)


def test_another_model_is_an_error_and_no_reason_to_fall_back(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 1), step)
    with pytest.raises(RestoreError, match=r"param\.other is missing"):
        state = even_layout(some_tensors(1), 1)[0]
        restore_from_checkpoint({"param.other": state["param.half"]}, store)


def test_parts_carry_a_checksum_for_every_chunk(store: Store, tmp_path: Path) -> None:
    manifest = save_and_commit(store, tmp_path, even_layout(some_tensors(1), 3), 10)
    parts = parts_of(store, manifest)
    assert len(parts) == 3
    for part in parts:
        assert part.checksums is not None
        assert len(part.checksums) == len(part.description.chunks)


@pytest.mark.slow
def test_on_s3(tmp_path: Path, s3_environment: S3Server) -> None:
    bucket = s3_environment.create_bucket("restore")
    store = Store.open(f"s3://{bucket}/job", StorageConfig(endpoint_url=s3_environment.endpoint_url))
    for step in (10, 20):
        save_and_commit(store, tmp_path, even_layout(some_tensors(step), 3), step)
    damaged = object_path(20, 1, 0)
    content = store.read(damaged)
    wanted = {step: even_layout(some_tensors(step), 2, dim=1)[1] for step in (10, 20)}
    target = emptied(wanted[20])
    loaded = restore_from_checkpoint(target, store)
    assert loaded is not None
    assert (loaded.manifest.step, loaded.refused) == (20, [])
    assert same(target, wanted[20])
    for spoil in (
        lambda: flip(store, damaged, 3),
        lambda: store.write(damaged, [content[:-1]]),
        lambda: store.delete(damaged),
    ):
        spoil()
        loaded = restore_from_checkpoint(target, store)
        assert loaded is not None
        assert loaded.manifest.step == 10
        assert damaged in loaded.refused[0]
        assert same(target, wanted[10])
