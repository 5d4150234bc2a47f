from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_train.checkpoint.catalog import commit
from elastic_train.checkpoint.errors import CheckpointError, SourceError
from elastic_train.checkpoint.manifest import CheckpointId, Manifest, object_path
from elastic_train.checkpoint.verify import choose_checkpoint, verify_checkpoint
from elastic_train.storage.errors import StorageError
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, first_claim, save, save_and_commit, some_tensors


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def committed(store: Store, tmp_path: Path, step: int, generation: int = 1) -> Manifest:
    return save_and_commit(store, tmp_path, even_layout(some_tensors(step), 3), step, generation)


def flip(store: Store, path: str, at: int) -> None:
    content = bytearray(store.read(path))
    content[at] ^= 1
    store.write(path, [content])


def test_a_whole_checkpoint_has_no_damage_and_every_byte_is_looked_at(store: Store, tmp_path: Path) -> None:
    manifest = committed(store, tmp_path, 10)
    seen: list[int] = []
    assert verify_checkpoint(store, manifest, seen.append) == []
    assert sum(seen) == sum(manifest.objects.values()) == sum(tensor.nbytes for tensor in some_tensors(1).values())


def test_every_flipped_byte_is_found_in_its_tensor(store: Store, tmp_path: Path) -> None:
    states = even_layout({"a": torch.ones(8), "b": torch.ones(2, 2)}, 1)
    manifest = save_and_commit(store, tmp_path, states, 10)
    (path,) = manifest.objects
    for at in range(manifest.objects[path]):
        flip(store, path, at)
        (damage,) = verify_checkpoint(store, manifest)
        assert damage.object == path
        assert damage.tensor == ("a" if at < 32 else "b")
        assert damage.byte_offset <= at < damage.byte_offset + damage.nbytes
        flip(store, path, at)
    assert verify_checkpoint(store, manifest) == []


def test_truncated_and_missing_objects_are_found_by_chunk(store: Store, tmp_path: Path) -> None:
    manifest = committed(store, tmp_path, 10)
    first, second, _ = manifest.objects
    store.write(first, [store.read(first)[:-1]])
    store.delete(second)
    damages = verify_checkpoint(store, manifest)
    in_first = [damage for damage in damages if damage.object == first]
    assert [damage.actual for damage in in_first] == [f"an object of {manifest.objects[first] - 1} bytes"]
    in_second = {damage.tensor for damage in damages if damage.object == second}
    assert in_second == {
        key for key, record in manifest.tensors.items() if any(chunk.object == second for chunk in record.chunks)
    }


def test_without_checkpoints_there_is_nothing_to_choose(store: Store) -> None:
    chosen = choose_checkpoint(store)
    assert (chosen.manifest, chosen.refused, chosen.refused_ids) == (None, [], [])


def test_the_newest_by_number_is_chosen_among_many_other_objects(store: Store, tmp_path: Path) -> None:
    for step in (999, 1000):
        committed(store, tmp_path, step)
    for n in range(1500):
        path = tmp_path / "job/checkpoints/step-00000001-g1" / f"{n:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    chosen = choose_checkpoint(store)
    assert chosen.manifest is not None
    assert chosen.manifest.step == 1000
    assert chosen.refused == []


def test_an_attempt_that_was_not_committed_is_ignored_with_a_word(store: Store, tmp_path: Path) -> None:
    committed(store, tmp_path, 10)
    save(store, tmp_path, even_layout(some_tensors(20), 4), 20, generation=2)
    chosen = choose_checkpoint(store)
    assert chosen.manifest is not None
    assert chosen.manifest.step == 10
    assert chosen.refused == [
        "step 20 is incomplete (generation 2 uploaded objects but no manifest) and is ignored",
    ]
    assert chosen.refused_ids == []
    with pytest.raises(
        CheckpointError, match=r"checkpoints/step-00000020-c\*\.json is missing in .*; committed steps: 10"
    ):
        choose_checkpoint(store, step=20)


def test_leftovers_of_another_attempt_do_not_get_into_a_later_commit_of_the_step(store: Store, tmp_path: Path) -> None:
    save(store, tmp_path, even_layout(some_tensors(1), 4), 20, generation=1)
    manifest = save_and_commit(store, tmp_path, even_layout(some_tensors(2), 2), 20, generation=2)
    assert set(manifest.objects) == {object_path(20, 2, 0), object_path(20, 2, 1)}
    chosen = choose_checkpoint(store, "full")
    assert (chosen.manifest, chosen.refused) == (manifest, [])


def test_a_wrong_size_is_seen_without_reading_and_the_one_before_is_chosen(store: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        newest = committed(store, tmp_path, step)
    damaged = object_path(30, 1, 1)
    store.write(damaged, [store.read(damaged)[:-1]])
    store.delete(object_path(20, 1, 2))
    chosen = choose_checkpoint(store, "sizes")
    assert chosen.manifest is not None
    assert chosen.manifest.step == 10
    assert chosen.refused_ids == [CheckpointId(30, 1), CheckpointId(20, 1)]
    size = newest.objects[damaged]
    assert f"step 30 is damaged: object {damaged}" in chosen.refused[0]
    assert f"expected {size} bytes, found {size - 1} bytes" in chosen.refused[0]
    assert f"object {object_path(20, 1, 2)}" in chosen.refused[1]
    assert "no such object" in chosen.refused[1]


def test_a_flipped_byte_is_seen_by_the_full_check(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)
    flip(store, object_path(20, 1, 0), 100)
    by_sizes, in_full = choose_checkpoint(store, "sizes"), choose_checkpoint(store, "full")
    assert by_sizes.manifest is not None
    assert in_full.manifest is not None
    assert (by_sizes.manifest.step, in_full.manifest.step) == (20, 10)
    assert f"object {object_path(20, 1, 0)}" in in_full.refused[0]
    assert "tensor" in in_full.refused[0]
    with pytest.raises(CheckpointError, match=f"step 20 is damaged: object {object_path(20, 1, 0)}"):
        choose_checkpoint(store, "full", step=20)


def test_an_excluded_step_and_an_unreadable_manifest_are_passed_over(store: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        committed(store, tmp_path, step)
    store.write("checkpoints/step-00000020-c1.json", [b"{}"])
    chosen = choose_checkpoint(store, exclude=[CheckpointId(30, 1)])
    assert chosen.manifest is not None
    assert chosen.manifest.step == 10
    assert chosen.refused_ids == [CheckpointId(20, 1)]
    assert "checkpoints/step-00000020-c1.json" in chosen.refused[0]


def test_storage_that_does_not_answer_says_nothing_about_a_checkpoint(store: Store, tmp_path: Path) -> None:
    manifest = committed(store, tmp_path, 10)
    commit(store, manifest, first_claim(store))

    class Silent(LocalStore):
        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path.endswith(".bin"):
                raise StorageError(path, "no answer")
            return super().read(path, offset, length)

    with pytest.raises(SourceError, match="no answer"):
        choose_checkpoint(Silent(tmp_path / "job"), "full")
