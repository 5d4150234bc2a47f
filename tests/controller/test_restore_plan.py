from __future__ import annotations

from typing import Any

from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.restore_plan import local_images, plan_restore
from tests.controller.records import hosts


def snapshots(step: int, places: str) -> Inventory:
    """Generation 4 with one rank per word of ``places``, each on the nodes of its word's letters."""
    inventory = Inventory()
    inventory.open_generation(4, len(places.split()))
    for rank, nodes in enumerate(places.split()):
        inventory.describe(4, rank, f"description {rank}")
        for node in nodes:
            inventory.add(4, rank, step, node, f"image {rank} on {node}")
    return inventory


def planned(inventory: Inventory, nodes: str, checkpoint: int | None, generation: int | None = None) -> dict[str, Any]:
    plan = plan_restore(inventory, set(nodes), CheckpointId(checkpoint, 3) if checkpoint else None, generation)
    there = hosts(nodes or "x")
    told = plan.directions(there[0], there, inventory)
    assert told["step"] == plan.step
    return told


def tiers(told: dict[str, Any]) -> tuple[int, bool, list[int], int | None]:
    """Step, whether memory suffices, the ranks that memory has, the checkpoint's claim."""
    return told["step"], told["whole"], [entry["rank"] for entry in told["ranks"]], told["checkpoint"]


def test_fresh_when_there_is_nothing() -> None:
    assert tiers(planned(Inventory(), "a", None)) == (0, False, [], None)
    assert tiers(planned(snapshots(7, "a b"), "a", None)) == (0, False, [], None)


def test_memory_is_preferred_to_a_checkpoint_of_the_same_or_an_older_step() -> None:
    inventory = snapshots(10, "a b")
    for checkpoint in (None, 5, 10):
        assert tiers(planned(inventory, "ab", checkpoint)) == (10, True, [0, 1], None)


def test_a_checkpoint_newer_than_what_is_in_memory() -> None:
    assert tiers(planned(snapshots(10, "a b"), "ab", 11)) == (11, False, [], 3)


def test_a_checkpoint_when_memory_is_incomplete() -> None:
    assert tiers(planned(snapshots(10, "a b"), "a", 5)) == (5, False, [], 3)
    assert tiers(planned(snapshots(10, "a b"), "a", 10)) == (10, False, [], 3)  # of an unknown generation
    assert tiers(planned(Inventory(), "a", 5)) == (5, False, [], 3)


def test_what_memory_lacks_of_a_checkpoints_own_step_and_generation_comes_from_storage() -> None:
    assert tiers(planned(snapshots(10, "a b"), "a", 10, 4)) == (10, False, [0], 3)
    assert tiers(planned(snapshots(10, "a b"), "ab", 10, 4)) == (10, True, [0, 1], 3)  # in case one cannot be read


def test_states_of_two_generations_are_never_mixed() -> None:
    inventory = snapshots(10, "a b")
    assert tiers(planned(inventory, "a", 10, 3)) == (10, False, [], 3)
    assert tiers(planned(inventory, "ab", 10, 3)) == (10, True, [0, 1], None)


def test_every_trainer_is_told_of_all_copies_with_a_living_host() -> None:
    inventory = snapshots(10, "a ab b bc")
    told = planned(inventory, "abc", None)
    assert told == {
        "step": 10,
        "generation": 4,
        "whole": True,
        "checkpoint": None,
        "ranks": [
            {
                "rank": 0,
                "description": "description 0",
                "copies": [{"node": "a", "image": "image 0 on a"}],
            },
            {
                "rank": 1,
                "description": "description 1",
                "copies": [
                    {"node": "a", "image": "image 1 on a"},
                    {"node": "b", "image": "image 1 on b", "address": ["127.0.0.1", 9002]},
                ],
            },
            {
                "rank": 2,
                "description": "description 2",
                "copies": [{"node": "b", "image": "image 2 on b", "address": ["127.0.0.1", 9002]}],
            },
            {
                "rank": 3,
                "description": "description 3",
                "copies": [
                    {"node": "b", "image": "image 3 on b", "address": ["127.0.0.1", 9002]},
                    {"node": "c", "image": "image 3 on c", "address": ["127.0.0.1", 9003]},
                ],
            },
        ],
    }
    assert local_images(told) == {"image 0 on a", "image 1 on a"}


def test_a_dead_nodes_images_are_not_asked_for() -> None:
    inventory = snapshots(10, "ab ab")
    survivors = hosts("ab")[:1] + hosts("cc")[1:]  # host 1 on a, host 2 on c; b is gone
    newcomer = plan_restore(inventory, {"a", "c"}, None).directions(survivors[1], survivors, inventory)
    assert [entry["copies"] for entry in newcomer["ranks"]] == [
        [{"node": "a", "image": "image 0 on a", "address": ["127.0.0.1", 9001]}],
        [{"node": "a", "image": "image 1 on a", "address": ["127.0.0.1", 9001]}],
    ]


def test_readers_are_spread_over_the_hosts_that_can_serve() -> None:
    inventory = snapshots(10, "a a a a")
    there = hosts("aab")
    told = plan_restore(inventory, {"a", "b"}, None).directions(there[2], there, inventory)
    assert [entry["copies"][0]["address"][1] for entry in told["ranks"]] == [9001, 9002, 9001, 9002]
