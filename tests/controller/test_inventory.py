from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.checkpoint.description import Description
from elastic_train.controller.inventory import Inventory, SnapshotSet

EMPTY = Description((), 0).to_json()


def opened(*worlds: int) -> Inventory:
    """Generations 1, 2, ... of these sizes, all described."""
    inventory = Inventory()
    for generation, world in enumerate(worlds, start=1):
        inventory.open_generation(generation, world)
        for rank in range(world):
            inventory.describe(generation, rank, EMPTY)
    return inventory


def hold(inventory: Inventory, generation: int, step: int, places: str) -> None:
    """The image of rank r is on the nodes of the r-th word: "ab b" is rank 0 on a and b, rank 1 on b."""
    for rank, nodes in enumerate(places.split()):
        for node in nodes:
            inventory.add(generation, rank, step, node, f"image-{generation}-{rank}")


def newest(inventory: Inventory, nodes: str) -> tuple[int, int] | None:
    """(step, generation)"""
    found = inventory.newest_complete(set(nodes))
    return (found.step, found.generation) if found else None


def test_a_step_is_complete_when_every_rank_is_on_some_of_the_nodes() -> None:
    inventory = opened(3)
    hold(inventory, 1, 5, "ab b c")
    assert newest(inventory, "abc") == (5, 1)
    assert newest(inventory, "bc") == (5, 1)
    assert newest(inventory, "ac") is None  # rank 1 is on b alone
    assert newest(inventory, "ab") is None
    assert newest(inventory, "") is None


def test_a_missing_rank_makes_a_step_incomplete() -> None:
    inventory = opened(3)
    hold(inventory, 1, 5, "ab b")
    assert newest(inventory, "abc") is None


def test_a_rank_without_description_makes_a_step_incomplete() -> None:
    inventory = Inventory()
    inventory.open_generation(1, 2)
    inventory.describe(1, 0, EMPTY)
    hold(inventory, 1, 1, "a a")
    assert newest(inventory, "a") is None
    inventory.describe(1, 1, EMPTY)
    assert newest(inventory, "a") == (1, 1)


def test_partner_copies_count_once_per_node() -> None:
    inventory = opened(2)
    hold(inventory, 1, 5, "aab b")
    found = inventory.newest_complete({"a", "b"})
    assert found is not None
    assert [found.copies(0), found.copies(1), found.copies(2)] == [2, 1, 0]
    assert {node: held.image for node, held in found.holders[0].items()} == {"a": "image-1-0", "b": "image-1-0"}


def test_the_newest_complete_step_wins_over_newer_incomplete_ones() -> None:
    inventory = opened(2)
    hold(inventory, 1, 9, "a a")
    hold(inventory, 1, 10, "ab ab")
    hold(inventory, 1, 11, "a b")
    assert newest(inventory, "ab") == (11, 1)
    assert newest(inventory, "b") == (10, 1)
    assert newest(inventory, "a") == (10, 1)


def test_of_equal_steps_the_newest_generation_wins() -> None:
    inventory = opened(2, 1, 3)
    hold(inventory, 3, 7, "a b c")
    hold(inventory, 1, 7, "a b")
    hold(inventory, 2, 7, "a")
    assert newest(inventory, "abc") == (7, 3)
    assert newest(inventory, "ab") == (7, 2)


def test_a_step_counts_more_than_a_generation() -> None:
    inventory = opened(1, 1)
    hold(inventory, 1, 8, "a")
    hold(inventory, 2, 7, "a")
    assert newest(inventory, "a") == (8, 1)


def test_supersede_forgets_older_steps_and_generations() -> None:
    inventory = opened(1, 2)
    hold(inventory, 1, 4, "a")
    hold(inventory, 1, 5, "b")
    hold(inventory, 2, 5, "a a")
    hold(inventory, 2, 6, "a b")
    finished = inventory.newest_complete({"a", "b"})
    assert finished is not None
    inventory.supersede(finished)
    assert newest(inventory, "ab") == (6, 2)
    assert newest(inventory, "a") is None
    assert newest(inventory, "b") is None
    assert set(inventory.descriptions) == {(2, 0), (2, 1)}
    assert inventory.add(1, 0, 9, "a", "image") is None  # generation 1 is over: its images are being deleted


def test_supersede_keeps_newer_steps() -> None:
    """The next step's first images may be reported before the last copy of the step before it."""
    inventory = opened(2)
    hold(inventory, 1, 6, "b")
    hold(inventory, 1, 5, "a b")
    finished = inventory.newest_complete({"a", "b"})
    assert finished is not None
    inventory.supersede(finished)
    inventory.add(1, 1, 6, "b", "image")
    assert newest(inventory, "b") == (6, 1)


def test_images_of_unknown_generations_and_ranks_are_not_taken() -> None:
    inventory = opened(2)
    assert inventory.add(2, 0, 1, "a", "image") is None
    assert inventory.add(1, 2, 1, "a", "image") is None
    assert inventory.add(1, -1, 1, "a", "image") is None
    assert newest(inventory, "a") is None
    assert inventory.add(1, 1, 1, "a", "image") is not None


def test_one_image_is_dropped_and_the_next_best_step_is_found() -> None:
    inventory = opened(2)
    hold(inventory, 1, 5, "ab b")
    hold(inventory, 1, 6, "ab b")
    assert inventory.drop(1, 0, 6, "a")
    assert newest(inventory, "ab") == (6, 1)
    assert inventory.drop(1, 0, 6, "b")
    assert not inventory.drop(1, 0, 6, "b")
    assert not inventory.drop(1, 0, 7, "b")
    assert newest(inventory, "ab") == (5, 1)


def test_steps_that_were_rolled_back_are_over_also_when_their_node_comes_back() -> None:
    inventory = opened(1)
    hold(inventory, 1, 20, "b")
    hold(inventory, 1, 19, "b")
    assert newest(inventory, "a") is None
    inventory.give_up_after(10)
    assert newest(inventory, "ab") is None
    assert inventory.add(1, 0, 20, "b", "image") is None
    inventory.open_generation(2, 1)
    inventory.describe(2, 0, EMPTY)
    hold(inventory, 2, 11, "a")
    hold(inventory, 1, 10, "b")
    assert newest(inventory, "ab") == (11, 2)
    assert newest(inventory, "b") == (10, 1)


NODES = "abc"
WORLDS = (2, 1, 3)
_add = st.tuples(st.just("add"), st.integers(1, 3), st.integers(0, 2), st.integers(1, 4), st.sampled_from(NODES))
_supersede = st.tuples(st.just("supersede"), st.sets(st.sampled_from(NODES)))


@given(actions=st.lists(_add | _add | _add | _supersede, max_size=40), alive=st.sets(st.sampled_from(NODES)))
def test_the_answer_is_the_newest_of_all_that_are_complete(actions: list[tuple], alive: set[str]) -> None:
    """Compared with a model that keeps every image it was told of and applies the definition."""
    inventory = opened(*WORLDS)
    images: set[tuple[int, int, int, str]] = set()  # step, generation, rank, node
    over = 0

    def complete(nodes: set[str]) -> list[tuple[int, int]]:
        return sorted(
            (step, generation)
            for step, generation in {image[:2] for image in images}
            if all(
                any((step, generation, rank, node) in images for node in nodes)
                for rank in range(WORLDS[generation - 1])
            )
        )

    for action in actions:
        if action[0] == "add":
            _, generation, rank, step, node = action
            taken = inventory.add(generation, rank, step, node, "image")
            assert (taken is not None) == (generation > over and rank < WORLDS[generation - 1])
            if taken is not None:
                images.add((step, generation, rank, node))
        elif (finished := inventory.newest_complete(action[1])) is not None:
            inventory.supersede(finished)
            key = (finished.step, finished.generation)
            over = max(over, finished.generation - 1)
            images = {image for image in images if image[:2] >= key and image[1] > over}
        expected = complete(alive)
        found: SnapshotSet | None = inventory.newest_complete(alive)
        assert (found and (found.step, found.generation)) == (expected[-1] if expected else None)
