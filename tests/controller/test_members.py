from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config.layout import Layout
from elastic_train.controller.generation import Generation, step_line
from elastic_train.controller.inventory import SnapshotSet
from elastic_train.controller.members import choose_partners, order_members
from elastic_train.controller.trouble import Trouble
from tests.controller.records import host, hosts


def numbers(members: list) -> list[int]:
    return [member.number for member in members]


@pytest.mark.parametrize(
    ("nodes", "count", "partners"),
    [
        ("aabb", 1, [[3], [4], [1], [2]]),
        ("aabb", 2, [[3], [4], [1], [2]]),  # no third node to put the second copy on
        ("aabb", 0, [[], [], [], []]),
        ("aabbcc", 1, [[3], [4], [5], [6], [1], [2]]),
        ("abc", 2, [[2, 3], [3, 1], [1, 2]]),
        ("aaa", 1, [[], [], []]),
        ("aaab", 1, [[4], [4], [4], [1]]),
        ("a", 3, [[]]),
    ],
)
def test_partners(nodes: str, count: int, partners: list[list[int]]) -> None:
    members = hosts(nodes)
    assert list(map(numbers, choose_partners(members, count))) == partners


@given(nodes=st.text("abcdefg", min_size=1, max_size=24), count=st.integers(0, 4))
def test_partners_are_on_other_nodes_each_on_one_of_its_own(nodes: str, count: int) -> None:
    members = hosts(nodes)
    load: Counter[int] = Counter()
    for member, partners in zip(members, choose_partners(members, count), strict=True):
        places = [partner.node for partner in partners]
        assert len(places) == min(count, len(set(nodes)) - 1)
        assert len(set(places)) == len(places)
        assert member.node not in places
        assert all(partner in members for partner in partners)
        load.update(numbers(partners))
    for node in set(nodes):  # inside a node nobody carries more than one copy (per source node) above another
        loads = [load[member.number] for member in members if member.node == node]
        assert max(loads) - min(loads) <= count


@given(hosts_per_node=st.integers(1, 4), nodes=st.integers(2, 6), count=st.integers(1, 3))
def test_equal_nodes_share_the_copies_evenly(hosts_per_node: int, nodes: int, count: int) -> None:
    members = hosts("".join(letter * hosts_per_node for letter in "abcdef"[:nodes]))
    load = Counter(partner.number for partners in choose_partners(members, count) for partner in partners)
    assert [load[member.number] for member in members] == [min(count, nodes - 1)] * len(members)


@pytest.mark.parametrize(
    ("nodes", "wanted", "order"),
    [
        ("abab", 4, [1, 3, 2, 4]),  # side by side
        ("abb", 3, [2, 3, 1]),  # the fullest node first
        ("abb", 2, [2, 3]),  # a pair inside one node rather than across two
        ("cab", 2, [1, 2]),  # equally full: in the order of joining
        ("aabbb", 4, [3, 4, 5, 1]),
    ],
)
def test_order_of_members(nodes: str, wanted: int, order: list[int]) -> None:
    assert numbers(order_members(hosts(nodes), wanted)) == order


@pytest.mark.parametrize(
    ("nodes", "wanted", "tensor", "spread", "order"),
    [
        ("aaaabbb", 4, 1, 2, [1, 2, 3, 5]),  # one node would do, but then copies would have no other to go to
        ("aaaabbb", 4, 1, 3, [1, 2, 3, 5]),
        ("aaaa", 2, 1, 2, [1, 2]),
        ("abc", 1, 1, 2, [1]),
        ("aaabbb", 4, 2, 2, [1, 2, 4, 5]),  # a pair of each, the third of each stays out
        ("abbcc", 4, 2, 2, [2, 3, 4, 5]),
        ("aaaaabbbb", 6, 2, 3, [1, 2, 3, 4, 6, 7]),
        ("aaab", 2, 2, 2, [1, 2]),
    ],
)
def test_tensor_ranks_share_a_node_and_members_two(
    nodes: str, wanted: int, tensor: int, spread: int, order: list[int]
) -> None:
    assert numbers(order_members(hosts(nodes), wanted, tensor, spread)) == order


@given(nodes=st.text("abcd", min_size=1, max_size=16), tensor=st.integers(1, 4), groups=st.integers(1, 8))
def test_tensor_groups_never_cross_nodes(nodes: str, tensor: int, groups: int) -> None:
    there = hosts(nodes)
    most = sum(count // tensor for count in Counter(nodes).values())
    ordered = order_members(there, min(groups, most) * tensor, tensor, spread=2)
    assert len(ordered) == min(groups, most) * tensor
    places = [member.node for member in ordered]
    assert all(len(set(places[start : start + tensor])) == 1 for start in range(0, len(places), tensor))


@given(nodes=st.text("abcd", min_size=1, max_size=16), wanted=st.integers(1, 16), seed=st.randoms())
def test_the_order_depends_on_the_hosts_only_and_keeps_nodes_together(nodes: str, wanted: int, seed: object) -> None:
    there = hosts(nodes)
    ordered = order_members(there, wanted)
    shuffled = list(there)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert order_members(shuffled, wanted) == ordered
    assert len(ordered) == min(wanted, len(there)) == len(set(numbers(ordered)))
    places = [member.node for member in ordered]
    assert sum(left != right for left, right in itertools.pairwise(places)) == len(set(places)) - 1


def told(step: int, **changes: float) -> dict:
    values = {"loss": 2.5, "grad_norm": 0.75, "lr": 1e-3, "valid_tokens": 256, "buffer": 1, "image": "x"}
    values |= {"stall_seconds": 0.0, "data_seconds": 0.0, "slots": [0, 8], "batch": "00000000000000ff"}
    return {"type": "stepped", "step": step, "seconds": 1.0, "snapshot_seconds": 0.1} | (values | changes)


def test_step_line() -> None:
    generation = Generation(3, Layout(pp=2), hosts("ab"), [[], []], 6, Trouble("start", ""))
    generation.stepped[7] = {
        1: told(7, seconds=2.0, stall_seconds=0.5, data_seconds=0.25),
        0: told(7, seconds=1.5, snapshot_seconds=0.3),
    }
    line = step_line(generation, 7, [4, 1])
    assert line.pop("time") > 1e9
    assert line == {
        "step": 7,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-3,
        "valid_tokens": 256,
        "seconds": 2.0,  # the slowest rank's
        "snapshot_seconds": 0.3,
        "stall_seconds": 0.5,
        "data_seconds": 0.25,
        "slots": [[0, 8]],
        "batch": "00000000000000ff",  # of one of the two ranks, which read the same
        "generation": 3,
        "layout": "pp2",
        "samples": [4, 1],
    }
    assert "samples" not in step_line(generation, 7, None)


def test_step_line_adds_up_what_the_data_ranks_were_given() -> None:
    layout = Layout(dp_shard=3, tp=2)
    generation = Generation(1, layout, hosts("aabbcc"), [[]] * 6, 0, Trouble("start", ""))
    slots = [[0, 3], [3, 6], [6, 8]]
    generation.stepped[1] = {
        rank: told(1) | {"slots": slots[rank // 2], "batch": f"{2**62 + rank // 2:016x}"} for rank in range(6)
    }
    line = step_line(generation, 1, None)
    assert (line["slots"], line["batch"]) == ([[0, 8]], f"{3 * 2**62 + 3:016x}")
    del generation.stepped[1][4]  # the other rank of its data rank has said it
    assert step_line(generation, 1, None)["batch"] == line["batch"]
    generation.stepped[1][2]["slots"] = generation.stepped[1][3]["slots"] = [2, 5]  # as no rank should
    assert step_line(generation, 1, None)["slots"] == [[0, 3], [2, 5], [6, 8]]
    del generation.stepped[1][5]  # its host has died with the coordinator: nobody can say what it was given
    assert {"slots", "batch"}.isdisjoint(step_line(generation, 1, None))


def test_what_is_said_twice_is_said_once() -> None:
    """A host tells it again to a coordinator that has come back, which may have heard it already."""
    generation = Generation(1, Layout(dp_shard=2), hosts("ab"), [[], []], 4, Trouble("start", ""), finished_step=4)
    snapshots = SnapshotSet(1, 5, 2)
    for rank, node in enumerate("ab"):
        snapshots.hold(rank, node, "image")
        generation.says(rank, told(5) | {"copies": []})
        generation.says(rank, told(5) | {"copies": []})
    assert generation.holds(snapshots)
    assert generation.newest_told == 5


def test_step_line_of_a_step_with_an_evaluation() -> None:
    generation = Generation(3, Layout(pp=2), hosts("ab"), [[], []], 6, Trouble("start", ""))
    generation.stepped[7] = {
        0: told(7, eval_loss=2.25, eval_seconds=0.5),
        1: told(7, eval_loss=2.25, eval_seconds=0.75),
    }
    line = step_line(generation, 7, None)
    assert (line["eval_loss"], line["eval_seconds"], line["seconds"]) == (2.25, 0.75, 1.0)
    assert "eval_loss_ema" not in line


@pytest.mark.parametrize(
    ("nodes", "full", "partners"),
    [
        ("abc", "b", [[3], [3], [1]]),  # the next node that has room
        ("abc", "bc", [[], [1], [1]]),
        ("aabb", "b", [[], [], [1], [2]]),
    ],
)
def test_nodes_without_room_get_no_copies(nodes: str, full: str, partners: list[list[int]]) -> None:
    members = hosts(nodes)
    assert list(map(numbers, choose_partners(members, 1, full))) == partners


def test_a_step_is_held_when_every_copy_that_its_hosts_promised_is_there() -> None:
    members = hosts("ab")
    generation = Generation(1, Layout(pp=2), members, [[members[1]], []], 0, Trouble("start", ""))
    snapshots = SnapshotSet(1, 5, 2)
    snapshots.hold(0, "a", "x")
    snapshots.hold(1, "b", "y")
    assert not generation.holds(snapshots)
    generation.says(0, {"step": 5, "copies": ["b", "c"]})
    assert not generation.holds(snapshots)
    generation.says(1, {"step": 5, "copies": []})
    snapshots.hold(1, "a", "y")  # by a host that had other partners before: not what was promised
    assert not generation.holds(snapshots)
    snapshots.hold(0, "b", "x")
    assert not generation.holds(snapshots)
    generation.is_refused(5, 0, "c")
    generation.is_refused(5, 0, "c")
    assert generation.holds(snapshots)
    generation.is_finished(5)
    assert generation.stepped == {}


def test_ranks() -> None:
    members = hosts("ab")
    generation = Generation(1, Layout(pp=2), members, [[members[1]], []], 0, Trouble("start", ""))
    assert [generation.rank_of(member) for member in members] == [0, 1]
    assert generation.rank_of(host(3, "a")) is None


def test_echoes() -> None:
    assert {kind for kind in ("host_lost", "trainer_killed", "exception", "peer", "hang", "copy_failed", "damaged")
            if Trouble(kind, "").is_echo} == {"peer", "copy_failed"}  # fmt: skip
