from __future__ import annotations

from pathlib import Path

from elastic_train.checkpoint.catalog import commit, read_catalog
from elastic_train.checkpoint.claims import FRESH, take_claim
from elastic_train.checkpoint.manifest import FOLDER, CheckpointId, object_path
from elastic_train.checkpoint.pins import pin
from elastic_train.checkpoint.survey import survey
from elastic_train.storage.store import Store
from tests.checkpoint.states import even_layout, save, save_and_commit, some_tensors


def test_every_kind_of_thing_is_told_apart(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "job"))
    states = even_layout(some_tensors(1), 2)
    take_claim(store, FRESH, "first", 1.7e9)
    for step in (999, 1000, 1010, 1020, 1100):
        save_and_commit(store, tmp_path, states, step)
    second = take_claim(store, 1020, "second", 1.7e9)
    pin(store, CheckpointId(1000, 1), "for the paper")
    store.delete(object_path(1010, 1, 1))
    commit(store, save(store, tmp_path, states, 1020, generation=2).model_copy(update={"claim": 2}), second)
    aside = CheckpointId(1020, 1).path.replace(FOLDER, f"{FOLDER}refused/")
    store.write(aside, [b"not a manifest any more"])
    store.write(CheckpointId(1030, 2).path, [b"garbled"])
    store.write(object_path(1030, 2, 0), [b"its object"])
    save(store, tmp_path, states, 1040, generation=2)
    unclaimed = save(store, tmp_path, states, 1050, generation=7).model_copy(update={"claim": 7})
    store.write(unclaimed.id.path, [unclaimed.to_json()])
    found = [(line.step, line.claim, str(line.status), line.objects) for line in survey(read_catalog(store))]
    assert found == [
        (999, 1, "committed", 2),
        (1000, 1, "pinned", 2),
        (1010, 1, "damaged", 2),
        (1020, 1, "refused", 0),
        (1020, 1, "superseded", 2),
        (1020, 2, "committed", 2),
        (1030, 2, "unreadable", 0),
        (1040, None, "incomplete", 2),
        (1050, 7, "unclaimed", 2),
        (1100, 1, "fenced", 2),
    ]
    notes = {(line.step, str(line.status)): line.note for line in survey(read_catalog(store))}
    assert notes[1000, "pinned"] == "for the paper"
    assert object_path(1010, 1, 1) in notes[1010, "damaged"]
    assert "no such object" in notes[1010, "damaged"]
    assert CheckpointId(1030, 2).path in notes[1030, "unreadable"]
