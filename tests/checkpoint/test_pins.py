from __future__ import annotations

from pathlib import Path

from elastic_train.checkpoint.catalog import list_checkpoints
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.checkpoint.pins import pin, pinned, unpin
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save_and_commit, some_tensors


def test_a_pin_is_seen_until_it_is_taken_away_and_is_no_checkpoint(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "job"))
    first = save_and_commit(store, tmp_path, even_layout(some_tensors(1), 1), 10).id
    pin(store, first, "before the new data")
    pin(store, CheckpointId(20, 3), "another")
    pin(store, first, "best so far")
    assert pinned(store.list("checkpoints/")) == {first, CheckpointId(20, 3)}
    assert list_checkpoints(store) == [10]
    unpin(store, first)
    unpin(store, first)
    assert pinned(store.list("checkpoints/")) == {CheckpointId(20, 3)}
