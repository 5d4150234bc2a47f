from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic_train.checkpoint.claims import (
    FRESH,
    Claim,
    announce,
    first_claim,
    go_on_from,
    newest_claim,
    require_newest,
    take_claim,
)
from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.storage.errors import AlreadyExists
from elastic_train.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "job"))


def claim(number: int, *history: tuple[int, int]) -> Claim:
    return Claim(number=number, holder="test", created=1.0, history=history)


def test_a_checkpoint_counts_when_every_later_claim_went_on_from_its_step_or_a_later_one() -> None:
    newest = claim(4, (1, FRESH), (2, 30), (3, 20), (4, 50))
    counted = {(step, by) for step in (10, 20, 30, 40, 50, 60) for by in (1, 2, 3, 4) if newest.counts(step, by)}
    assert counted == {
        *((step, 1) for step in (10, 20)),
        *((step, 2) for step in (10, 20)),
        *((step, 3) for step in (10, 20, 30, 40, 50)),
        *((step, 4) for step in (10, 20, 30, 40, 50, 60)),
    }
    assert not newest.counts(10, 5)  # a claim that is not there


def test_a_fresh_start_takes_all_that_was_before_out_of_the_history() -> None:
    newest = claim(2, (1, FRESH), (2, FRESH))
    assert not newest.counts(0, 1)
    assert newest.counts(0, 2)


def test_claims_are_numbered_and_carry_the_whole_history(store: Store) -> None:
    assert newest_claim(store) is None
    first = first_claim(store, "a", 1.0)
    assert (first.number, first.from_step, first.path) == (1, FRESH, "checkpoints/claim-00000001.json")
    with pytest.raises(AlreadyExists):
        first_claim(store, "b", 2.0)
    announced = announce(store, "b", 2.0)
    assert (announced.number, announced.from_step) == (2, None)
    assert announced.history == first.history
    decided = go_on_from(store, announced, 30, 3.0)
    assert (decided.number, decided.from_step, decided.holder) == (3, 30, "b")
    assert newest_claim(store) == decided
    assert take_claim(store, 40, "c", 4.0).history == ((1, FRESH), (3, 30), (4, 40))


def test_after_a_lost_answer_its_own_claim_is_found_and_is_no_other_submission(store: Store) -> None:
    first = first_claim(store, "a", 1.0)
    lost = go_on_from(store, first, 30, 2.0)
    assert go_on_from(store, first, 30, 3.0) == lost
    back = go_on_from(store, first, 20, 4.0)  # it has gone back further meanwhile
    assert (back.number, back.history) == (3, ((1, FRESH), (2, 30), (3, 20)))
    announce(store, "b", 5.0)
    with pytest.raises(Fenced, match="of b"):
        go_on_from(store, back, 10, 6.0)


def test_an_announced_claim_changes_nothing_of_what_counts_but_fences_all_others(store: Store) -> None:
    first = first_claim(store, "a", 1.0)
    require_newest(store, first)
    announced = announce(store, "b", 2.0)
    assert all(announced.counts(step, 1) for step in (10, 1000))
    with pytest.raises(Fenced, match=r"claim 1 on .* is superseded by claim 2 of b; .* neither commit nor delete"):
        require_newest(store, first)
    require_newest(store, announced)


def test_of_two_that_take_over_at_once_the_later_one_goes_on(store: Store) -> None:
    first_claim(store, "a", 1.0)
    earlier, later = announce(store, "b", 2.0), announce(store, "c", 3.0)
    with pytest.raises(Fenced, match="superseded by claim 3 of c"):
        go_on_from(store, earlier, 10, 4.0)
    assert go_on_from(store, later, 10, 5.0).number == 4


def test_of_many_at_once_each_gets_a_number_of_its_own(store: Store) -> None:
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda name=str(n): taken.append(announce(store, name, 1.0).number)) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 9))


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "swap"])
def test_a_damaged_record_is_named_and_never_read_as_another_history(store: Store, damage: str) -> None:
    first = take_claim(store, FRESH, "a", 1.0)
    second = take_claim(store, 30, "b", 2.0)
    text = store.read(second.path)
    damaged = {
        "truncate": text[:-1],
        "flip": text.replace(b"30", b"20"),
        "empty": b"",
        "swap": b'{"claim":{},"xxh3":"0000000000000000"}',
    }[damage]
    store.write(second.path, [damaged])
    with pytest.raises(CheckpointError, match=rf"{second.path} in .* is damaged: .* delete it"):
        newest_claim(store)
    with pytest.raises(Fenced, match="superseded by claim 2;"):  # it is there, whatever it says
        require_newest(store, first)


def test_a_holder_whose_record_is_gone_does_not_commit_what_would_not_count(store: Store) -> None:
    taken = take_claim(store, FRESH, "a", 1.0)
    store.delete(taken.path)
    with pytest.raises(CheckpointError, match=r"claim-00000001\.json is gone"):
        require_newest(store, taken)


def test_a_lost_record_does_not_give_its_number_away(store: Store) -> None:
    """Or the new holder's claim would be that of checkpoints which somebody else has made."""
    store.write(CheckpointId(30, 7).path, [b"{}"])
    assert announce(store, "b", 1.0).number == 8
