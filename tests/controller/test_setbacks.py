from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.layout import Layout
from elastic_train.controller.copies import Copies
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.setbacks import Pause, Setbacks, how_it_ended
from elastic_train.controller.trouble import Trouble
from tests.controller.records import hosts


class Ledger(list[tuple[str, dict[str, Any]]]):
    def record(self, event: str, **fields: Any) -> None:
        self.append((event, fields))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self if name == event]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def numbers(partners: list[list[HostRecord]]) -> list[list[int]]:
    return [[partner.number for partner in of_rank] for of_rank in partners]


def test_pauses_grow_up_to_a_limit() -> None:
    pause = Pause(1.0, 5.0)
    assert [pause.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_only_exceptions_count_and_a_finished_step_forgives_them(ledger: Ledger) -> None:
    setbacks = Setbacks(2, ledger.record)
    for kind in (
        "unreadable",
        "storage",
        "no_room",
        "peer",
        "host_lost",
        "damaged",
        "trainer_killed",
        "trainer_exited",
    ):
        assert setbacks.reason_to_end(Trouble(kind, "")) is None
    assert setbacks.reason_to_end(Trouble("exception", "x")) is None
    setbacks.step_finished()
    assert setbacks.reason_to_end(Trouble("exception", "x")) is None
    assert setbacks.reason_to_end(Trouble("exception", "y")) == "y (2 times in a row)"
    setbacks.step_finished()
    assert setbacks.reason_to_end(Trouble("out_of_memory", "x")) is None
    assert setbacks.reason_to_end(Trouble("trainer_crashed", "y")) == "y (2 times in a row)"


def test_what_ends_ends_at_once(ledger: Ledger) -> None:
    assert Setbacks(5, ledger.record).reason_to_end(Trouble("bad_step", "x", ends=True)) == "x"


@pytest.mark.parametrize(
    ("cause", "memory", "kind"),
    [
        ("SIGKILL", None, "trainer_killed"),
        ("SIGKILL", "killed by the kernel", "out_of_memory"),
        ("SIGSEGV", None, "trainer_crashed"),
        ("exit code 1", None, "trainer_exited"),
    ],
)
def test_how_a_trainer_ended(cause: str, memory: str | None, kind: str) -> None:
    (host,) = hosts("a")
    trouble = how_it_ended(host, {"rank": 3, "cause": cause, "out_of_memory": memory})
    assert trouble.kind == kind
    assert trouble.detail == f"rank 3 on {host.label} ended: {cause}" + (f", {memory}" if memory else "")


def test_storage_is_asked_ever_more_rarely_until_a_step_is_finished(ledger: Ledger) -> None:
    setbacks = Setbacks(1, ledger.record)
    assert [setbacks.storage_pause() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    setbacks.step_finished()
    assert setbacks.storage_pause() == 1


def test_one_host_of_a_full_node_is_left_out_at_a_time(ledger: Ledger) -> None:
    members = hosts("abb")
    generation = Generation(1, Layout(dp_shard=3), members, [[], [], []], 0, Trouble("start", ""))
    setbacks = Setbacks(1, ledger.record)
    setbacks.no_room(members[2], generation, "x needs 5 bytes")
    setbacks.no_room(members[1], generation, "y needs 5 bytes")
    assert [member.usable for member in members] == [True, True, False]
    assert [(e["host"], e["node"], e["detail"]) for e in ledger.named("no_room")] == [(3, "b", "x needs 5 bytes")]
    smaller = Generation(2, Layout(dp_shard=2), members[:2], [[], []], 0, Trouble("no_room", ""))
    setbacks.no_room(members[1], smaller, "y needs 5 bytes")  # one less was not enough
    assert [member.usable for member in members] == [True, False, False]


def test_fewer_nodes_than_copies_are_said_once(ledger: Ledger) -> None:
    chosen = Copies(2, tuple, ledger.record)
    assert numbers(chosen.choose(hosts("abc"))) == [[2, 3], [3, 1], [1, 2]]
    assert not ledger
    for _ in range(3):
        assert numbers(chosen.choose(hosts("ab"))) == [[2], [1]]
    assert ledger.named("fewer_copies") == [
        {"copies": 1, "detail": "snapshot.partners=2 needs 3 nodes; there are 2"},
    ]
    chosen.choose(hosts("abc"))
    chosen.choose(hosts("a"))
    assert [event["copies"] for event in ledger.named("fewer_copies")] == [1, 0]


def test_partners_are_chosen_again_only_when_nodes_get_full_or_are_tried_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, counted = 1000.0, list[int]()
    chosen, members = Copies(1, tuple, ledger.record, lambda: now), hosts("abc")
    generation = Generation(1, Layout(dp_shard=3), members, [], 0, Trouble("start", ""))
    generation.partners = chosen.choose(members)
    monkeypatch.setattr(chosen, "tell", lambda generation, ranks: counted.extend(ranks))
    choose = chosen.choose
    calls = list[int]()
    monkeypatch.setattr(chosen, "choose", lambda members: (calls.append(1), choose(members))[1])
    for _ in range(3):
        chosen.look(generation)
    assert (len(calls), counted) == (1, [])
    chosen.refused("b", "b is full")
    for _ in range(3):
        chosen.look(generation)
    assert (len(calls), counted) == (2, [0])
    assert numbers(generation.partners) == [[3], [3], [1]]
    now += 61
    for _ in range(3):
        chosen.look(generation)
    assert (len(calls), counted) == (3, [0, 0])
    assert numbers(generation.partners) == [[2], [3], [1]]


def test_hosts_that_take_no_part_keep_copies_where_the_members_have_too_few_nodes(ledger: Ledger) -> None:
    there = hosts("aabbc")
    chosen, members = Copies(1, lambda: there, ledger.record), there[:2]
    generation = Generation(1, Layout(dp_shard=2), members, chosen.choose(members), 0, Trouble("start", ""))
    assert numbers(generation.partners) == [[3], [4]]
    assert [partner["needed"] for partner in generation.told_partners(0)] == [False]
    there[2].leaving = there[3].leaving = True  # b is being taken away
    with pytest.MonkeyPatch.context() as patch:
        told = list[int]()
        patch.setattr(chosen, "tell", lambda generation, ranks: told.extend(ranks))
        chosen.look(generation)
        assert (numbers(generation.partners), told) == ([[5], [5]], [0, 1])
        chosen.look(generation)
        chosen.dropped("c", "c does not answer")
        chosen.look(generation)
        assert (numbers(generation.partners), told) == ([[], []], [0, 1, 0, 1])
        there.append(hosts("abcdef")[5])
        chosen.look(generation)
        assert numbers(generation.partners) == [[6], [6]]
    assert [event["node"] for event in ledger.named("partner_lost")] == ["c"]
    assert [event["copies"] for event in ledger.named("fewer_copies")] == [0]


def test_hosts_that_take_no_part_keep_none_where_the_members_have_nodes_enough(ledger: Ledger) -> None:
    there = hosts("abc")
    chosen, members = Copies(1, lambda: there, ledger.record), there[:2]
    generation = Generation(1, Layout(dp_shard=2), members, chosen.choose(members), 0, Trouble("start", ""))
    assert numbers(generation.partners) == [[2], [1]]
    assert [partner["needed"] for partner in generation.told_partners(0)] == [True]
    assert not ledger


def test_a_full_node_is_left_out_until_its_time_is_over_or_a_host_joins_it(
    ledger: Ledger,
) -> None:
    now = 1000.0
    chosen, members = Copies(1, tuple, ledger.record, lambda: now), hosts("abc")
    for _ in range(2):  # two ranks' copies are refused
        chosen.refused("b", "b is full")
    assert numbers(chosen.choose(members)) == [[3], [3], [1]]
    now += 61
    assert numbers(chosen.choose(members)) == [[2], [3], [1]]
    chosen.refused("b", "b is still full")
    assert [event["retry_seconds"] for event in ledger.named("partner_full")] == [60.0, 120.0]
    assert numbers(chosen.choose(members)) == [[3], [3], [1]]
    chosen.joined("b")
    assert numbers(chosen.choose(members)) == [[2], [3], [1]]
    chosen.refused("b", "full")
    chosen.refused("c", "full")
    assert numbers(chosen.choose(members)) == [[], [1], [1]]
    assert ledger.named("fewer_copies") == [
        {"copies": 0, "detail": "snapshot.partners=1 needs 2 nodes; there are 3, 2 of them without room"}
    ]
