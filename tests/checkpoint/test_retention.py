from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_train.checkpoint.catalog import commit, list_checkpoints, load_manifest
from elastic_train.checkpoint.claims import FRESH, Claim, announce, go_on_from, newest_claim, take_claim
from elastic_train.checkpoint.errors import Fenced
from elastic_train.checkpoint.manifest import CheckpointId, Manifest, object_path
from elastic_train.checkpoint.pins import pin
from elastic_train.checkpoint.retention import Removed, apply_retention, plan_retention, set_aside
from elastic_train.checkpoint.tidy import tidy
from elastic_train.checkpoint.verify import choose_checkpoint, verify_checkpoint
from elastic_train.config.operation import CheckpointConfig
from elastic_train.storage.errors import StorageError
from elastic_train.storage.local import LocalStore
from elastic_train.storage.store import Entry, Store
from tests.checkpoint.states import even_layout, first_claim, save, save_and_commit, some_tensors


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def committed(store: Store, tmp_path: Path, step: int, generation: int = 1, **metrics: float) -> CheckpointId:
    """By the newest claim."""
    manifest = save(store, tmp_path, even_layout(some_tensors(step), 2), step, generation)
    claim = first_claim(store)
    commit(store, manifest.model_copy(update={"claim": claim.number, "metrics": metrics}), claim)
    return CheckpointId(step, claim.number)


def attempted(store: Store, step: int, generation: int, attempt: str = "") -> str:
    """An object of a save that was never committed."""
    path = object_path(step, generation, 0, attempt)
    store.write(path, [b"half"])
    return path


def age(store: Store, path: str, seconds: float) -> None:
    file = store.local_path(path)
    assert file is not None
    os.utime(file, (store.now() - seconds,) * 2)


def config(**values: object) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"keep_last": 1, "grace_seconds": 0.0, **values})


def apply(store: Store, settings: CheckpointConfig) -> Removed:
    claim = newest_claim(store)
    assert claim is not None
    return apply_retention(store, plan_retention(store, settings, claim), claim)


def attempts(store: Store) -> set[str]:
    """Folders of attempts that have objects, e.g. ``step-00000010-g1``."""
    return {entry.path.split("/")[1] for entry in store.list("checkpoints/") if entry.path.endswith(".bin")}


# -- which checkpoints stay ------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_rest_goes_with_its_objects(store: Store, tmp_path: Path) -> None:
    for step in (999, 1000, 1001, 5):
        committed(store, tmp_path, step)
    store.write("steps.jsonl", [b"not a checkpoint"])
    size = sum(e.size for e in store.list("checkpoints/step-00000005-g1") + store.list("checkpoints/step-00000999-g1"))
    removed = apply(store, config(keep_last=2))
    assert (removed.steps, removed.objects, removed.nbytes) == ([5, 999], 4, size)
    assert list_checkpoints(store) == [1000, 1001]
    assert attempts(store) == {"step-00001000-g1", "step-00001001-g1"}
    assert choose_checkpoint(store, "full").refused == []
    assert store.exists("steps.jsonl")


def test_nothing_is_removed_while_there_are_no_more_than_that(store: Store, tmp_path: Path) -> None:
    assert plan_retention(store, config(), None).keep == {}
    for step in (10, 20):
        committed(store, tmp_path, step)
    assert apply(store, config(keep_last=2)).objects == 0
    assert list_checkpoints(store) == [10, 20]


def test_every_rule_keeps_its_own_and_says_so(store: Store, tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.0, 50: float("nan"), 60: 1.0, 70: None, 80: 4.0}
    for step, loss in losses.items():
        committed(store, tmp_path, step, **({} if loss is None else {"eval_loss": loss}), loss=9.0 - step / 10)
    pin(store, CheckpointId(10, 1), "the first")
    store.delete(object_path(60, 1, 0))  # the best, but damaged
    plan = plan_retention(store, config(keep_last=1, keep_every=50, keep_best=2), None)
    assert {checkpoint.step: reasons for checkpoint, reasons in plan.keep.items()} == {
        80: ["newest", "last good"],
        50: ["every 50"],
        40: ["best eval_loss 2"],
        20: ["best eval_loss 2"],
        10: ["pinned"],
        60: ["damaged"],
    }
    assert [checkpoint.step for checkpoint in plan.delete] == [30, 70]
    assert list_checkpoints(store) == sorted(losses)  # a plan changes nothing
    assert plan.nbytes == sum(
        entry.size for step in (30, 70) for entry in store.list(f"checkpoints/step-{step:08d}-g1/")
    )


def test_another_metric_and_of_equal_values_the_later(store: Store, tmp_path: Path) -> None:
    for step, loss in ((10, 1.0), (20, 2.0), (30, 1.0), (40, 5.0)):
        committed(store, tmp_path, step, loss=loss, eval_loss=float(step))
    plan = plan_retention(store, config(keep_best=1, metric="loss"), None)
    assert {checkpoint.step: reasons for checkpoint, reasons in plan.keep.items()} == {
        40: ["newest", "last good"],
        30: ["best loss 1"],
    }


def test_a_damaged_checkpoint_does_not_count_so_the_last_good_one_stays(store: Store, tmp_path: Path) -> None:  # FA-10
    for step in (10, 20, 30, 40):
        committed(store, tmp_path, step)
    store.delete(object_path(40, 1, 0))
    store.write(CheckpointId(30, 1).path, [b"{"])
    assert apply(store, config()).steps == [10]
    assert list_checkpoints(store) == [20, 30, 40]
    chosen = choose_checkpoint(store, "full")
    assert chosen.manifest is not None
    assert chosen.manifest.step == 20
    assert "step-00000030-g1" in attempts(store)  # whose objects they are cannot be read


def test_when_all_are_damaged_nothing_is_removed(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)
        store.delete(object_path(step, 1, 0))
    plan = plan_retention(store, config(), None)
    assert set(map(tuple, plan.keep.values())) == {("damaged",)}
    apply(store, config())
    assert attempts(store) == {"step-00000010-g1", "step-00000020-g1"}


def test_a_checkpoint_that_was_pinned_after_the_plan_was_made_stays_whole(store: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        committed(store, tmp_path, step)
    claim = newest_claim(store)
    assert claim is not None
    plan = plan_retention(store, config(), claim)
    assert [checkpoint.step for checkpoint in plan.delete] == [10, 20]
    pin(store, plan.delete[1], "at the last moment")
    assert apply_retention(store, plan, claim).steps == [10]
    assert list_checkpoints(store) == [20, 30]
    assert verify_checkpoint(store, load_manifest(store, 20)) == []
    assert attempts(store) == {"step-00000020-g1", "step-00000030-g1"}


# -- garbage ---------------------------------------------------------------------------------------------------------


def test_remains_of_dead_saves_go_when_they_are_older_than_the_grace_time(store: Store, tmp_path: Path) -> None:
    committed(store, tmp_path, 20, 2)
    old, young = attempted(store, 10, 1), attempted(store, 60, 1)
    age(store, old, 4000)
    age(store, young, 3000)
    plan = plan_retention(store, config(grace_seconds=3600.0), None)
    assert [entry.path for entry in plan.garbage] == [old]
    assert plan.nbytes == len(b"half")
    assert apply(store, config(grace_seconds=3600.0)).objects == 1
    assert attempts(store) == {"step-00000060-g1", "step-00000020-g2"}


def test_a_save_that_may_be_going_on_is_left_alone_whatever_its_age(store: Store, tmp_path: Path) -> None:
    """Of the newest claim: a later step, or a later generation than its newest checkpoint."""
    claim = go_on_from(store, announce(store, "a", 1.0), FRESH, 1.0)
    committed(store, tmp_path, 30, 4)
    mine = f"c{claim.number}"
    going_on = {attempted(store, 40, 4, f"{mine}-7"), attempted(store, 25, 5, f"{mine}-8")}
    over = {attempted(store, 20, 4, f"{mine}-3"), attempted(store, 30, 3, f"{mine}-4")}
    others = {attempted(store, 50, 9, f"c{claim.number - 1}-1"), attempted(store, 60, 9)}
    for path in going_on | over | others:
        age(store, path, 1e6)
    plan = plan_retention(store, config(), None)
    assert {entry.path for entry in plan.garbage} == over | others
    go_on_from(store, claim, 30, 2.0)  # somebody else, or the same after it went back: now all are over
    plan = plan_retention(store, config(), None)
    assert {entry.path for entry in plan.garbage} == over | others | going_on


def test_manifests_that_do_not_count_go_with_their_objects(store: Store, tmp_path: Path) -> None:
    first = take_claim(store, FRESH, "a", 1.0)
    committed(store, tmp_path, 10, 1)
    zombie = save(store, tmp_path, even_layout(some_tensors(1), 2), 20, 1).model_copy(update={"claim": first.number})
    second = take_claim(store, 10, "b", 1.0)
    store.create(zombie.id.path, zombie.to_json())
    mine = save(store, tmp_path, even_layout(some_tensors(2), 3), 20, 2).model_copy(update={"claim": second.number})
    commit(store, mine, second)
    within = plan_retention(store, config(keep_last=9, grace_seconds=60.0), second)
    assert within.garbage == []
    plan = plan_retention(store, config(keep_last=9), second)
    assert {entry.path for entry in plan.garbage} == {zombie.id.path, *zombie.objects}
    apply_retention(store, plan, second)
    assert attempts(store) == {"step-00000010-g1", "step-00000020-g2"}
    chosen = choose_checkpoint(store, "full")
    assert chosen.manifest == mine


def test_of_a_manifest_that_does_not_count_the_objects_stay_as_long_as_it_does(store: Store, tmp_path: Path) -> None:
    take_claim(store, FRESH, "a", 1.0)
    fenced = save_and_commit(store, tmp_path, even_layout(some_tensors(1), 2), 20)
    take_claim(store, FRESH, "b", 1.0)
    for path in fenced.objects:
        age(store, path, 1e6)
    assert plan_retention(store, config(grace_seconds=60.0), None).garbage == []
    store.write(fenced.id.path, [b"{"])  # not even readable
    assert plan_retention(store, config(grace_seconds=60.0), None).garbage == []
    assert len(plan_retention(store, config(), None).garbage) == 3


def test_refused_checkpoints_stay_for_the_grace_time(store: Store, tmp_path: Path) -> None:
    refused = committed(store, tmp_path, 20)
    claim = take_claim(store, FRESH, "b", 1.0)
    aside = set_aside(store, refused, claim)
    assert aside == "checkpoints/refused/step-00000020-c1.json"
    for entry in store.list("checkpoints/step-"):
        age(store, entry.path, 1e6)
    assert plan_retention(store, config(grace_seconds=60.0), claim).garbage == []
    age(store, aside, 61)
    plan = plan_retention(store, config(grace_seconds=60.0), claim)
    assert [entry.path for entry in plan.garbage] == [aside, object_path(20, 1, 0), object_path(20, 1, 1)]
    apply_retention(store, plan, claim)
    assert [entry.path for entry in store.list("checkpoints/")] == [
        "checkpoints/claim-00000001.json",
        "checkpoints/claim-00000002.json",
    ]


def test_checkpoints_whose_claim_is_lost_are_not_removed(store: Store, tmp_path: Path) -> None:
    first = take_claim(store, FRESH, "a", 1.0)
    committed(store, tmp_path, 10)
    second = take_claim(store, 10, "b", 1.0)
    lost = committed(store, tmp_path, 20, 2)
    store.delete(second.path)
    assert list_checkpoints(store) == [10]
    plan = plan_retention(store, config(), first)
    assert plan.keep[lost] == ["unreadable"]
    assert plan.garbage == []


def test_writes_that_were_never_ended_go_after_the_grace_time(store: Store, tmp_path: Path) -> None:
    claim = first_claim(store)
    committed(store, tmp_path, 20, 1)
    names = {
        "dead": "checkpoints/step-00000030-g1-c7-1/.tmp-1",
        "young": "checkpoints/step-00000030-g1-c7-1/.tmp-2",
        "going on": f"checkpoints/step-00000040-g1-c{claim.number}-2/.tmp-3",
    }
    for name, path in names.items():
        file = store.local_path(path)
        assert file is not None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"1")
        age(store, path, 10.0 if name == "young" else 1e6)
    plan = plan_retention(store, config(grace_seconds=60.0), claim)
    assert [write.path for write in plan.unfinished] == [names["dead"]]
    assert apply_retention(store, plan, claim).unfinished == 1
    assert {write.path for write in store.unfinished("checkpoints/")} == {names["young"], names["going on"]}


def test_one_list_whatever_there_is(store: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        committed(store, tmp_path, step)

    class Counting(LocalStore):
        lists = 0

        def list(self, prefix: str = "") -> list[Entry]:
            self.lists += 1
            return super().list(prefix)

    counting = Counting(tmp_path / "job")
    plan_retention(counting, config(), None)
    assert counting.lists == 1


# -- who may, and what a crash leaves --------------------------------------------------------------------------------


def manifest_of(store: Store, tmp_path: Path, step: int, claim: Claim) -> Manifest:
    manifest = save(store, tmp_path, even_layout(some_tensors(step), 2), step, 7)
    return manifest.model_copy(update={"claim": claim.number})


def test_a_zombie_can_neither_commit_nor_delete(store: Store, tmp_path: Path) -> None:
    zombie = first_claim(store)
    ids = [committed(store, tmp_path, step) for step in (10, 20)]
    plan = plan_retention(store, config(), zombie)
    assert plan.delete == ids[:1]
    announce(store, "b", 2.0)
    late = manifest_of(store, tmp_path, 30, zombie)
    before = store.list()
    for act in (
        lambda: commit(store, late, zombie),
        lambda: plan_retention(store, config(), zombie),
        lambda: apply_retention(store, plan, zombie),
        lambda: set_aside(store, ids[1], zombie),
        lambda: tidy(store, zombie, config()),
    ):
        with pytest.raises(Fenced):
            act()
    assert store.list() == before


def test_a_claim_that_is_lost_in_the_middle_ends_the_removal(store: Store, tmp_path: Path) -> None:
    zombie = first_claim(store)
    for step in (10, 20, 30):
        committed(store, tmp_path, step)

    class Overtaken(LocalStore):
        def delete(self, path: str) -> None:
            super().delete(path)
            if path == CheckpointId(10, 1).path:
                announce(store, "b", 2.0)

    with pytest.raises(Fenced):
        apply_retention(Overtaken(tmp_path / "job"), plan_retention(store, config(), zombie), zombie)
    assert list_checkpoints(store) == [20, 30]


def test_an_announced_claim_cannot_commit_before_it_says_where_it_goes_on(store: Store, tmp_path: Path) -> None:
    announced = announce(store, "b", 2.0)
    with pytest.raises(ValueError, match="cannot be committed"):
        commit(store, manifest_of(store, tmp_path, 10, announced), announced)


def test_a_crash_in_the_middle_leaves_no_manifest_without_objects(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)

    class Dying(LocalStore):
        def delete(self, path: str) -> None:
            if path.endswith(".bin"):
                raise StorageError(path, "killed")
            super().delete(path)

    claim = first_claim(store)
    dying = Dying(tmp_path / "job")
    with pytest.raises(StorageError, match="killed"):
        apply_retention(dying, plan_retention(dying, config(), claim), claim)
    assert list_checkpoints(store) == [20]
    assert tidy(dying, claim, config()).error.endswith("killed")  # a save is not undone by it
    committed(store, tmp_path, 30, generation=2)
    apply(store, config(keep_last=2))
    assert attempts(store) == {"step-00000020-g1", "step-00000030-g2"}


def test_a_step_that_was_refused_can_be_committed_anew(store: Store, tmp_path: Path) -> None:
    for step in (10, 20):
        committed(store, tmp_path, step)
    store.delete(object_path(20, 1, 0))
    refused = choose_checkpoint(store).refused_ids
    claim = take_claim(store, 10, "b", 2.0)
    assert [set_aside(store, checkpoint, claim) for checkpoint in refused] == [
        "checkpoints/refused/step-00000020-c1.json"
    ]
    set_aside(store, refused[0], claim)  # once more, after a crash
    assert list_checkpoints(store) == [10]
    committed(store, tmp_path, 20, generation=2)
    chosen = choose_checkpoint(store, "full")
    assert chosen.manifest is not None
    assert (chosen.manifest.id, chosen.manifest.generation) == (CheckpointId(20, 2), 2)
    apply(store, config(keep_last=2))
    assert attempts(store) == {"step-00000010-g1", "step-00000020-g2"}
