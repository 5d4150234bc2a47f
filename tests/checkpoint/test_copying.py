from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest, read_catalog
from elastic_train.checkpoint.claims import FRESH, announce, go_on_from, newest_claim, take_claim
from elastic_train.checkpoint.compare import Saved, compare
from elastic_train.checkpoint.copying import copy_checkpoint
from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk
from elastic_train.checkpoint.manifest import CheckpointId, Manifest, object_path
from elastic_train.checkpoint.pins import pin_reason
from elastic_train.checkpoint.verify import choose_checkpoint, verify_checkpoint
from elastic_train.storage.errors import StorageError
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save_and_commit, some_tensors


@pytest.fixture
def source(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "source"))


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "a+b" / "copy of it"))


def committed(store: Store, tmp_path: Path, step: int, ranks: int = 3, seed: int | None = None) -> Manifest:
    return save_and_commit(store, tmp_path, even_layout(some_tensors(seed or step), ranks), step)


class Dying(LocalStore):
    """Fails, as a process that is killed would end, at the write or create number ``calls``."""

    def __init__(self, root: Path, calls: int) -> None:
        super().__init__(root)
        self.calls = calls

    def _call(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise StorageError(self.uri, "killed")

    def write(self, path: str, chunks: Iterable[Any], size_hint: int | None = None) -> int:
        self._call()
        return super().write(path, chunks, size_hint)

    def create(self, path: str, data: bytes) -> None:
        self._call()
        super().create(path, data)


def test_a_copy_is_the_same_state_and_counts_in_a_new_folder(source: Store, target: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10)
    seen: list[int] = []
    copied = copy_checkpoint(source, manifest, target, progress=seen.append)
    assert (copied.created, copied.reused, sum(seen)) == (True, 0, manifest.nbytes)
    found = choose_checkpoint(target, "full").manifest
    assert found == copied.manifest
    assert compare(Saved(source, manifest), Saved(target, copied.manifest)).same
    assert verify_checkpoint(target, copied.manifest) == []
    take_claim(target, 10, "the next coordinator", 1.7e9)
    assert list_checkpoints(target) == [10]


def test_copying_again_and_back_does_nothing(source: Store, target: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10)
    first = copy_checkpoint(source, manifest, target).manifest
    before = target.list()
    again = copy_checkpoint(source, manifest, target)
    assert (again.created, again.manifest, target.list()) == (False, first, before)
    assert not copy_checkpoint(target, first, source).created
    third = Store.open(str(tmp_path / "third"))
    copy_checkpoint(target, first, third)
    assert load_manifest(third, 10).objects == first.objects, "a copy of a copy has the same paths"


@pytest.mark.parametrize("calls", range(6))
def test_a_copy_that_is_cut_short_leaves_no_checkpoint_and_goes_on_where_it_was(
    source: Store, tmp_path: Path, calls: int
) -> None:
    """Three objects, a claim and the manifest: five calls."""
    manifest = committed(source, tmp_path, 10)
    dying = Dying(tmp_path / "target", calls)
    if calls < 5:
        with pytest.raises(StorageError, match="killed"):
            copy_checkpoint(source, manifest, dying)
    else:
        copy_checkpoint(source, manifest, dying)
    target = Store.open(str(tmp_path / "target"))
    assert list_checkpoints(target) == ([] if calls < 5 else [10])
    there = sum(entry.size for entry in target.list("checkpoints/step-") if entry.path.endswith(".bin"))
    copied = copy_checkpoint(source, manifest, target)
    assert (copied.created, copied.reused) == (calls < 5, there if calls < 5 else 0)
    assert choose_checkpoint(target, "full").manifest == copied.manifest


def test_what_an_earlier_copy_left_is_checked_before_it_is_used(source: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10)
    with pytest.raises(StorageError, match="killed"):
        copy_checkpoint(source, manifest, Dying(tmp_path / "target", 3))
    target = Store.open(str(tmp_path / "target"))
    path = target.list("checkpoints/")[0].path
    content = bytearray(target.read(path))
    content[7] ^= 1
    target.write(path, [content])
    copied = copy_checkpoint(source, manifest, target)
    assert copied.reused == manifest.nbytes - len(content)
    assert verify_checkpoint(target, copied.manifest) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_in_the_source_is_named_and_nothing_is_committed(
    source: Store, target: Store, tmp_path: Path, damage: str
) -> None:
    manifest = committed(source, tmp_path, 10)
    path = object_path(10, 1, 1)
    content = bytearray(source.read(path))
    content[3] ^= 1
    if damage == "remove":
        source.delete(path)
    else:
        source.write(path, [content if damage == "flip" else content[:-1]])
    with pytest.raises(DamagedChunk, match=path):
        copy_checkpoint(source, manifest, target)
    assert list_checkpoints(target) == []


def test_another_checkpoint_of_the_step_is_not_replaced(source: Store, target: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10)
    there = committed(target, tmp_path, 10, seed=99)
    with pytest.raises(CheckpointError, match="has another checkpoint of step 10"):
        copy_checkpoint(source, manifest, target)
    assert load_manifest(target, 10) == there


@pytest.mark.parametrize("step", [10, 40])
def test_in_a_folder_with_claims_the_copy_counts_under_the_newest(
    source: Store, target: Store, tmp_path: Path, step: int
) -> None:
    """Older and newer than what is there; the claims stay as they are."""
    manifest = committed(source, tmp_path, step)
    committed(target, tmp_path, 20)
    take_claim(target, 20, "second", 1.7e9)
    claim = take_claim(target, 20, "third", 1.7e9)
    copied = copy_checkpoint(source, manifest, target)
    assert (copied.manifest.id, newest_claim(target)) == (CheckpointId(step, 3), claim)
    assert list_checkpoints(target) == sorted([20, step])
    take_claim(target, max(20, step), "goes on", 1.7e9)
    assert list_checkpoints(target) == sorted([20, step])


class Overtaken(LocalStore):
    """Somebody takes a claim just before the first manifest is created."""

    def create(self, path: str, data: bytes) -> None:
        if CheckpointId.of(path) == CheckpointId(10, 1):
            take_claim(LocalStore(self.uri), FRESH, "a new coordinator", 1.7e9)
        super().create(path, data)


def test_a_takeover_during_the_copy_does_not_make_it_void(source: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10)
    overtaken = Overtaken(tmp_path / "target")
    copied = copy_checkpoint(source, manifest, overtaken, pin_reason="mine")
    assert copied.manifest.claim == 2
    assert read_catalog(overtaken).committed == [CheckpointId(10, 2)]
    assert pin_reason(overtaken, CheckpointId(10, 2)) == "mine"
    assert pin_reason(overtaken, CheckpointId(10, 1)) is None


def test_nothing_is_committed_while_a_coordinator_decides_where_to_go_on(
    source: Store, target: Store, tmp_path: Path
) -> None:
    manifest = committed(source, tmp_path, 10)
    claim = announce(target, "node-b pid 9", 1.7e9)
    with pytest.raises(CheckpointError, match="node-b pid 9 is just taking over"):
        copy_checkpoint(source, manifest, target)
    go_on_from(target, claim, FRESH, 1.7e9)
    copied = copy_checkpoint(source, manifest, target)
    assert (copied.reused, list_checkpoints(target)) == (manifest.nbytes, [10])


class Swept(LocalStore):
    """Retention of a running job takes an object away before the manifest is there."""

    def create(self, path: str, data: bytes) -> None:
        if CheckpointId.of(path) is not None:
            self.delete(self.list("checkpoints/step-")[0].path)
        super().create(path, data)


def test_objects_that_are_gone_at_the_end_leave_no_checkpoint(source: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10)
    with pytest.raises(CheckpointError, match="were removed meanwhile"):
        copy_checkpoint(source, manifest, Swept(tmp_path / "target"))
    target = Store.open(str(tmp_path / "target"))
    assert list_checkpoints(target) == []
    assert copy_checkpoint(source, manifest, target).created


def test_bytes_between_chunks_come_along(source: Store, target: Store, tmp_path: Path) -> None:
    manifest = committed(source, tmp_path, 10, ranks=1)
    (path,) = manifest.objects
    source.write(path, [source.read(path), b"a tail of no tensor"])
    longer = manifest.model_copy(update={"objects": {path: source.size(path)}})
    copied = copy_checkpoint(source, longer, target).manifest
    (copy,) = copied.objects
    assert target.read(copy) == source.read(path)
