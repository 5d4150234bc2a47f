from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.catalog import commit, list_checkpoints, load_manifest, read_catalog
from elastic_train.checkpoint.claims import FRESH, Claim, take_claim
from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.manifest import CheckpointId, Manifest, object_path
from elastic_train.checkpoint.restore_checkpoint import restore_from_checkpoint
from elastic_train.checkpoint.tidy import tidy
from elastic_train.checkpoint.verify import choose_checkpoint
from elastic_train.config.operation import CheckpointConfig, StorageConfig
from elastic_train.controller.resumption import TakenOver, fall_back, take_over
from elastic_train.storage.store import Store
from tests.checkpoint.memory_store import MemoryStore, PausingStore, Turns
from tests.checkpoint.states import emptied, even_layout, same, some_tensors, upload_images, write_images
from tests.s3_server import S3Server


def manifest(claim: Claim, step: int, path: str = "") -> Manifest:
    path = path or object_path(step, 1, 0, f"c{claim.number}-{step}")
    return Manifest(
        step=step,
        claim=claim.number,
        generation=1,
        cursor=step,
        created=1.0,
        seed=1,
        layout={},
        config_digest="c",
        data_digest="d",
        model={},
        metrics={},
        versions={},
        block_bytes=1,
        objects={path: 4},
        tensors={},
    )


def uploaded(store: Store, claim: Claim, step: int) -> Manifest:
    made = manifest(claim, step)
    for path in made.objects:
        store.write(path, [b"four"])
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def test_the_catalog_sorts_by_number_and_tells_what_counts(store: Store) -> None:
    first = take_claim(store, FRESH, "a", 1.0)
    for step in (1000, 20, 999):
        assert commit(store, uploaded(store, first, step), first).created
    second = take_claim(store, 999, "b", 2.0)
    commit(store, uploaded(store, second, 1001), second)
    catalog = read_catalog(store)
    assert catalog.claim == second
    assert catalog.committed == [CheckpointId(20, 1), CheckpointId(999, 1), CheckpointId(1001, 2)]
    assert catalog.fenced == [CheckpointId(1000, 1)]
    assert catalog.attempts == {(step, 1) for step in (20, 999, 1000, 1001)}
    assert catalog.find(999) == CheckpointId(999, 1)
    with pytest.raises(CheckpointError, match=r"step 1000 has no committed checkpoint.*committed steps: 20, 999, 1001"):
        catalog.find(1000)


def test_a_step_that_was_done_again_is_that_of_the_later_claim(store: Store) -> None:
    first = take_claim(store, FRESH, "a", 1.0)
    commit(store, uploaded(store, first, 20), first)
    second = take_claim(store, 10, "b", 2.0)
    commit(store, uploaded(store, second, 20), second)
    assert load_manifest(store, 20).claim == 2
    assert read_catalog(store).fenced == [CheckpointId(20, 1)]


def test_ck_11_to_commit_a_step_again_does_no_harm(store: Store) -> None:
    """CK-11: the answer to the commit was lost, or the same step is saved anew: what is there stays."""
    claim = take_claim(store, FRESH, "a", 1.0)
    first = uploaded(store, claim, 70)
    assert commit(store, first, claim).created
    again = first.model_copy(update={"created": 2.0})
    for other in (first, again):
        answer = commit(store, other, claim)
        assert (answer.created, answer.manifest) == (False, first)
    assert list_checkpoints(store) == [70]


def test_without_any_claim_all_count(store: Store) -> None:
    """A folder whose claims are lost, or that was copied without them."""
    claim = take_claim(store, FRESH, "a", 1.0)
    commit(store, uploaded(store, claim, 10), claim)
    store.delete(claim.path)
    assert list_checkpoints(store) == [10]
    taken = take_over(store, "b", 2.0)
    assert (taken.claim.number, taken.checkpoint) == (3, CheckpointId(10, 1))
    assert list_checkpoints(store) == [10]


# -- coordinators that are paused at any storage call ----------------------------------------------------------------


@dataclass
class Job:
    """What really happened: who decided to go on from what, and which checkpoints were ever made."""

    store: MemoryStore = field(default_factory=MemoryStore)
    turns: Turns = field(default_factory=Turns)
    bases: dict[int, CheckpointId | None] = field(default_factory=dict)
    """claim -> what its holder goes on from"""
    refused: dict[int, set[CheckpointId]] = field(default_factory=dict)
    commits: set[CheckpointId] = field(default_factory=set)

    def coordinate(self, name: str, saves: int, falls_back: bool) -> None:
        """Take over, perhaps find wrong bytes in what is loaded, then save every tenth step."""
        store = PausingStore(self.store, self.turns, name)
        settings = CheckpointConfig(keep_last=1, grace_seconds=0.0)
        try:
            taken = self._decided(take_over(store, name, 1.0))
            if falls_back and taken.checkpoint is not None:
                taken = self._decided(fall_back(store, taken.claim, 1.0, (taken.checkpoint,)))
            step = taken.checkpoint.step if taken.checkpoint else 0
            for _ in range(saves):
                step += 10
                self.commits.add(commit(store, uploaded(store, taken.claim, step), taken.claim).manifest.id)
                tidy(store, taken.claim, settings)
        except Fenced:
            pass

    def _decided(self, taken: TakenOver) -> TakenOver:
        self.bases[taken.claim.number] = taken.checkpoint
        return taken

    def check(self) -> CheckpointId | None:
        """The loader's choice, which must lie in the history of the newest claim that says where it goes on."""
        chosen = choose_checkpoint(self.store).manifest
        newest = read_catalog(self.store).claim
        if newest is None or not newest.history:
            assert chosen is None
            return None
        number, step = newest.history[-1]
        base = self.bases.get(number)
        if base is None and step != FRESH:
            return None  # its holder has not had its turn since it created the record
        if chosen is None:
            assert base is None
            return None
        assert chosen.id == base or chosen.claim == number, f"{chosen.id} is not of claim {number} from {base}"
        assert base is None or chosen.step >= base.step
        return chosen.id


@pytest.mark.slow
@settings(max_examples=250)
@given(
    plans=st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=2, max_size=4),
    turns=st.lists(st.integers(0, 3), min_size=20, max_size=200),
    rest=st.permutations(range(4)),
)
def test_whatever_zombies_do_the_loader_chooses_from_the_newest_history(
    plans: list[tuple[int, bool]], turns: list[int], rest: list[int]
) -> None:
    """Each coordinator may be paused before any storage call, also between a look at the claims and a delete."""
    job = Job()
    for index, (saves, falls_back) in enumerate(plans):
        name = str(index)
        job.turns.start(name, lambda name=name, plan=(saves, falls_back): job.coordinate(name, *plan))
    for turn in turns:
        if str(turn) in job.turns.running:
            job.turns.step(str(turn))
            job.check()
    for turn in rest:  # each zombie goes on to its end, in any order
        while str(turn) in job.turns.running:
            job.turns.step(str(turn))
            job.check()
    assert job.turns.errors == []
    last = job.check()
    if job.commits and last is None:
        assert any(falls_back for _, falls_back in plans)  # everything there was has been refused


def paused_zombie(pause: int) -> bool:
    """The first coordinator is paused before its call number ``pause``, goes on when the second has saved.

    Returns whether it had not got that far.
    """
    job = Job()
    job.turns.start("zombie", lambda: job.coordinate("zombie", 3, False))
    for _ in range(pause):
        if "zombie" in job.turns.running:
            job.turns.step("zombie")
    over = "zombie" not in job.turns.running
    job.turns.start("second", lambda: job.coordinate("second", 1, False))
    for name in ("second", "zombie"):
        while name in job.turns.running:
            job.turns.step(name)
            job.check()
    assert job.turns.errors == []
    assert job.check() is not None
    return over


def test_a_zombie_that_wakes_up_before_any_of_its_calls_deletes_nothing_that_is_needed() -> None:
    pauses = next(pause for pause in itertools.count() if paused_zombie(pause))
    assert pauses > 30


# -- cases that others have met --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ck_08_the_newest_is_found_behind_a_thousand_other_keys(s3_environment: S3Server, s3_bucket: str) -> None:
    """CK-08: steps 999 and 1000, and 1,500 keys that sort before them, on a server whose LIST gives 1,000 at a time."""
    config = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    store = Store.open(f"s3://{s3_bucket}/ck-08", config)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.write(f"checkpoints/aaa/{n:05d}", [b""]), range(1500)))
    claim = take_claim(store, FRESH, "a", 1.0)
    for step in (999, 1000):
        commit(store, uploaded(store, claim, step), claim)
    page = s3_environment.client().list_objects_v2(Bucket=s3_bucket, Prefix="ck-08/checkpoints/")
    assert page["IsTruncated"]
    assert not any("step-" in item["Key"] for item in page["Contents"])
    assert list_checkpoints(store) == [999, 1000]
    taken = take_over(store, "b", 2.0)
    assert (taken.checkpoint, taken.refused) == (CheckpointId(1000, 1), [])


def test_ck_12_leftovers_of_another_attempt_are_not_mixed_into_a_checkpoint(store: Store, tmp_path: Path) -> None:
    """CK-12: four ranks have left objects of step 20, two save it again, and there is other junk."""
    leftovers = write_images(tmp_path, even_layout(some_tensors(1), 4), 20, generation=1)
    upload_images(store, leftovers, 20, 1)
    junk = [object_path(20, 2, rank) for rank in (2, 3)] + ["checkpoints/step-00000020-g2/optim.pt"]
    for path in junk:
        store.write(path, [b"junk"])
    claim = take_claim(store, FRESH, "a", 1.0)
    states = even_layout(some_tensors(2), 2)
    made = upload_images(store, write_images(tmp_path, states, 20, generation=2), 20, 2)
    commit(store, made, claim)
    assert made.objects == {path: store.size(path) for path in (object_path(20, 2, 0), object_path(20, 2, 1))}
    for rank, wanted in enumerate(states):
        target = emptied(wanted)
        loaded = restore_from_checkpoint(target, store, rank=rank)
        assert loaded is not None
        assert same(target, wanted)
    tidy(store, claim, CheckpointConfig(grace_seconds=0.0))
    assert {entry.path for entry in store.list("checkpoints/step-")} == {made.id.path, *made.objects}
