from __future__ import annotations

from typing import Any

from elastic_train.checkpoint.description import Chunk, Description
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.restore_plan import RestorePlan, plan_restore
from tests.controller.records import hosts


def rows(begin: int, end: int) -> Description:
    """Rows of one tensor of 100 rows."""
    return Description((Chunk("w", "float32", (100, 4), (begin, 0), (end - begin, 4), 0, 16 * (end - begin)),), 4096)


ALL = rows(0, 100)


def snapshots(step: int, places: str) -> Inventory:
    """Generation 4 with ten rows for each word of ``places``, each on the nodes of its word's letters."""
    inventory = Inventory()
    inventory.open_generation(4, len(places.split()))
    for rank, nodes in enumerate(places.split()):
        inventory.describe(4, rank, rows(10 * rank, 10 * rank + 10).to_json())
        inventory.read(4, rank)
        for node in nodes:
            inventory.add(4, rank, step, node, f"image {rank} on {node}")
    return inventory


def by_node(there: list[HostRecord]) -> dict[str, list[HostRecord]]:
    found: dict[str, list[HostRecord]] = {}
    for host in there:
        found.setdefault(host.node, []).append(host)
    return found


def directions(
    plan: RestorePlan, inventory: Inventory, there: list[HostRecord], on: str, needs: Description = ALL, rank: int = 0
) -> list[dict[str, Any]]:
    return plan.directions(rank, on, needs, by_node(there), inventory)


def planned(
    inventory: Inventory, nodes: str, checkpoint: int | None, generation: int | None = None
) -> tuple[int, bool, list[int], int | None]:
    """Step, whether memory suffices, the ranks that memory has, the checkpoint's claim."""
    plan = plan_restore(inventory, set(nodes), CheckpointId(checkpoint, 3) if checkpoint else None, generation)
    there = hosts(nodes or "x")
    told = plan.summary(there[0].node)
    ranks = [entry["rank"] for entry in directions(plan, inventory, there, there[0].node)]
    assert told["step"] == plan.step
    assert told["memory"] or not ranks
    return told["step"], told["whole"], ranks, told["checkpoint"]


def test_fresh_when_there_is_nothing() -> None:
    assert planned(Inventory(), "a", None) == (0, False, [], None)
    assert planned(snapshots(7, "a b"), "a", None) == (0, False, [], None)


def test_memory_is_preferred_to_a_checkpoint_of_the_same_or_an_older_step() -> None:
    inventory = snapshots(10, "a b")
    for checkpoint in (None, 5, 10):
        assert planned(inventory, "ab", checkpoint) == (10, True, [0, 1], None)


def test_a_checkpoint_newer_than_what_is_in_memory() -> None:
    assert planned(snapshots(10, "a b"), "ab", 11) == (11, False, [], 3)


def test_a_checkpoint_when_memory_is_incomplete() -> None:
    assert planned(snapshots(10, "a b"), "a", 5) == (5, False, [], 3)
    assert planned(snapshots(10, "a b"), "a", 10) == (10, False, [], 3)  # of an unknown generation
    assert planned(Inventory(), "a", 5) == (5, False, [], 3)


def test_what_memory_lacks_of_a_checkpoints_own_step_and_generation_comes_from_storage() -> None:
    assert planned(snapshots(10, "a b"), "a", 10, 4) == (10, False, [0], 3)
    assert planned(snapshots(10, "a b"), "ab", 10, 4) == (10, True, [0, 1], 3)  # in case one cannot be read


def test_states_of_two_generations_are_never_mixed() -> None:
    inventory = snapshots(10, "a b")
    assert planned(inventory, "a", 10, 3) == (10, False, [], 3)
    assert planned(inventory, "ab", 10, 3) == (10, True, [0, 1], None)


def test_a_trainer_is_told_of_all_copies_of_what_it_needs_that_have_a_living_host() -> None:
    inventory = snapshots(10, "a ab b bc")
    plan = plan_restore(inventory, set("abc"), None)
    assert plan.summary("a") == {
        "step": 10,
        "whole": True,
        "checkpoint": None,
        "memory": True,
        "images": ["image 0 on a", "image 1 on a"],
    }
    assert plan.summary("d")["images"] == []
    there = hosts("abc")
    assert directions(plan, inventory, there, "a", rows(15, 25)) == [
        {
            "rank": 1,
            "description": rows(10, 20).to_json(),
            "copies": [
                {"node": "a", "image": "image 1 on a"},
                {"node": "b", "image": "image 1 on b", "address": ["127.0.0.1", 9002]},
            ],
        },
        {
            "rank": 2,
            "description": rows(20, 30).to_json(),
            "copies": [{"node": "b", "image": "image 2 on b", "address": ["127.0.0.1", 9002]}],
        },
    ]
    assert [entry["rank"] for entry in directions(plan, inventory, there, "a")] == [0, 1, 2, 3]


def test_a_dead_nodes_images_are_not_asked_for() -> None:
    inventory = snapshots(10, "ab ab")
    survivors = hosts("ab")[:1] + hosts("cc")[1:]  # host 1 on a, host 2 on c; b is gone
    plan = plan_restore(inventory, {"a", "c"}, None)
    assert [entry["copies"] for entry in directions(plan, inventory, survivors, "c")] == [
        [{"node": "a", "image": "image 0 on a", "address": ["127.0.0.1", 9001]}],
        [{"node": "a", "image": "image 1 on a", "address": ["127.0.0.1", 9001]}],
    ]


def test_readers_are_spread_over_the_hosts_that_can_serve() -> None:
    inventory = snapshots(10, "a a a a")
    there = hosts("aab")
    told = directions(plan_restore(inventory, {"a", "b"}, None), inventory, there, "b")
    assert [entry["copies"][0]["address"][1] for entry in told] == [9001, 9002, 9001, 9002]
