from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints
from elastic_train.checkpoint.manifest import CheckpointId, object_path
from elastic_train.checkpoint.retention import keep_last, set_aside
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.storage.errors import StorageError
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save, save_and_commit, some_tensors


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def committed(store: Store, tmp_path: Path, step: int, generation: int = 1) -> None:
    save_and_commit(store, tmp_path, even_layout(some_tensors(step), 2), step, generation)


def attempted(store: Store, tmp_path: Path, step: int, generation: int) -> None:
    save(store, tmp_path, even_layout(some_tensors(step), 2), step, generation)


def attempts(store: Store) -> set[str]:
    """Folders of attempts that have objects, e.g. ``step-00000010-g1``."""
    return {entry.path.split("/")[1] for entry in store.list("checkpoints/") if entry.path.endswith(".bin")}


def test_the_newest_are_kept_and_the_rest_goes_with_its_objects(store: Store, tmp_path: Path) -> None:
    for step in (999, 1000, 1001, 5):
        committed(store, tmp_path, step)
    store.write("steps.jsonl", [b"not a checkpoint"])
    removed = keep_last(store, 2)
    assert removed.steps == [5, 999]
    assert removed.objects == 4
    assert list_checkpoints(store) == [1000, 1001]
    assert attempts(store) == {"step-00001000-g1", "step-00001001-g1"}
    assert choose_checkpoint(store, "full").refused == []
    assert store.exists("steps.jsonl")


def test_nothing_is_removed_while_there_are_no_more_than_that(store: Store, tmp_path: Path) -> None:
    assert keep_last(store, 1).steps == []
    for step in (10, 20):
        committed(store, tmp_path, step)
    assert keep_last(store, 2).objects == 0
    assert list_checkpoints(store) == [10, 20]


def test_a_damaged_checkpoint_does_not_count_so_the_last_good_one_stays(store: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        committed(store, tmp_path, step)
    store.delete(object_path(40, 1, 0))
    store.write(CheckpointId(30, 1).path, [b"{"])
    assert keep_last(store, 1).steps == [10]
    assert list_checkpoints(store) == [20, 30, 40]
    chosen = choose_checkpoint(store, "full")
    assert chosen.manifest is not None
    assert chosen.manifest.step == 20


def test_when_all_are_damaged_nothing_is_removed(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)
        store.delete(object_path(step, 1, 0))
    keep_last(store, 1)
    assert list_checkpoints(store) == [10, 20]
    assert attempts(store) == {"step-00000010-g1", "step-00000020-g1"}


def test_attempts_of_fenced_generations_are_removed_and_those_that_may_still_commit_are_not(
    store: Store, tmp_path: Path
) -> None:
    attempted(store, tmp_path, 10, 1)  # generation 1 died while it uploaded
    attempted(store, tmp_path, 60, 1)  # beyond the newest commit: left for later
    committed(store, tmp_path, 20, 2)
    attempted(store, tmp_path, 15, 2)  # the generation of the newest commit: may be on its way
    attempted(store, tmp_path, 30, 2)
    attempted(store, tmp_path, 20, 3)
    removed = keep_last(store, 3)
    assert (removed.steps, removed.objects) == ([], 2)
    assert attempts(store) == {
        "step-00000060-g1",
        "step-00000020-g2",
        "step-00000015-g2",
        "step-00000030-g2",
        "step-00000020-g3",
    }


def test_a_crash_in_the_middle_leaves_no_manifest_without_objects(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)

    class Dying(LocalStore):
        def delete(self, path: str) -> None:
            if path.endswith(".bin"):
                raise StorageError(path, "killed")
            super().delete(path)

    with pytest.raises(StorageError, match="killed"):
        keep_last(Dying(tmp_path / "job"), 1)
    assert list_checkpoints(store) == [20]
    committed(store, tmp_path, 30, generation=2)
    keep_last(store, 2)
    assert attempts(store) == {"step-00000020-g1", "step-00000030-g2"}


def test_keep_must_be_positive(store: Store) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        keep_last(store, 0)


def test_a_step_that_was_refused_can_be_committed_anew(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)
    store.delete(object_path(20, 1, 0))
    for step in choose_checkpoint(store).refused_ids:
        assert set_aside(store, step) == "checkpoints/refused/step-00000020-c1.json"
    assert list_checkpoints(store) == [10]
    committed(store, tmp_path, 20, generation=2)
    chosen = choose_checkpoint(store, "full")
    assert chosen.manifest is not None
    assert (chosen.manifest.step, chosen.manifest.generation) == (20, 2)
    keep_last(store, 2)
    assert attempts(store) == {"step-00000010-g1", "step-00000020-g2"}
