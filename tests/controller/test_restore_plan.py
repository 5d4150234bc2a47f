from __future__ import annotations

from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.restore_plan import plan_restore
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


def kind_and_step(inventory: Inventory, nodes: str, checkpoint: int | None) -> tuple[str, int]:
    plan = plan_restore(inventory, set(nodes), CheckpointId(checkpoint, 3) if checkpoint else None)
    there = hosts(nodes or "x")
    told = plan.directions(there[0], there, inventory)
    assert told["step"] == plan.step
    return told["kind"], plan.step


def test_fresh_when_there_is_nothing() -> None:
    assert kind_and_step(Inventory(), "a", None) == ("fresh", 0)
    assert kind_and_step(snapshots(7, "a b"), "a", None) == ("fresh", 0)


def test_memory_is_preferred_to_a_checkpoint_of_the_same_or_an_older_step() -> None:
    inventory = snapshots(10, "a b")
    for checkpoint in (None, 5, 10):
        assert kind_and_step(inventory, "ab", checkpoint) == ("snapshots", 10)


def test_a_checkpoint_newer_than_what_is_in_memory() -> None:
    assert kind_and_step(snapshots(10, "a b"), "ab", 11) == ("checkpoint", 11)


def test_a_checkpoint_when_memory_is_incomplete() -> None:
    assert kind_and_step(snapshots(10, "a b"), "a", 5) == ("checkpoint", 5)
    assert kind_and_step(Inventory(), "a", 5) == ("checkpoint", 5)


def test_every_old_rank_is_read_from_the_own_node_or_a_living_host() -> None:
    inventory = snapshots(10, "a ab b bc")
    there = hosts("abc")
    plan = plan_restore(inventory, {"a", "b", "c"}, None)
    assert plan.directions(there[0], there, inventory) == {
        "kind": "snapshots",
        "step": 10,
        "parts": [
            {"description": "description 0", "local": True, "image": "/dev/shm/pool-a/image 0 on a"},
            {"description": "description 1", "local": True, "image": "/dev/shm/pool-a/image 1 on a"},
            {
                "description": "description 2",
                "local": False,
                "image": "image 2 on b",
                "address": ["127.0.0.1", 9002],
            },
            # two hosts have it; rank 3 asks the second, so that not all ranks ask the same
            {
                "description": "description 3",
                "local": False,
                "image": "image 3 on c",
                "address": ["127.0.0.1", 9003],
            },
        ],
    }


def test_a_dead_nodes_images_are_not_asked_for() -> None:
    inventory = snapshots(10, "ab ab")
    survivors = hosts("ab")[:1] + hosts("cc")[1:]  # host 1 on a, host 2 on c; b is gone
    plan = plan_restore(inventory, {"a", "c"}, None)
    newcomer = plan.directions(survivors[1], survivors, inventory)
    assert [(part["local"], part["address"], part["image"]) for part in newcomer["parts"]] == [
        (False, ["127.0.0.1", 9001], "image 0 on a"),
        (False, ["127.0.0.1", 9001], "image 1 on a"),
    ]


def test_readers_are_spread_over_the_hosts_that_can_serve() -> None:
    inventory = snapshots(10, "a a a a")
    there = hosts("aab")
    parts = plan_restore(inventory, {"a", "b"}, None).directions(there[2], there, inventory)["parts"]
    assert [part["address"][1] for part in parts] == [9001, 9002, 9001, 9002]
