"""A coordinator that has come back asks what is in memory: each node is looked at once, by one host."""

from __future__ import annotations

from typing import Any, cast

from elastic_train.checkpoint.description import Description
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.survey import SURVEY_SECONDS, Survey
from elastic_train.controller.wire import Connection
from tests.controller.records import hosts


class Asked:
    """What the coordinator has sent to a host."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def send(self, message: dict[str, Any]) -> None:
        self.kinds.append(message["type"])


def surveyed(nodes: str) -> tuple[Survey, list[HostRecord], list[list[str]]]:
    """One host for each letter of ``nodes``, all of them asked; what each has been told."""
    survey, found, asked = Survey(100.0), hosts(nodes), [Asked() for _ in nodes]
    for host, connection in zip(found, asked, strict=True):
        host.connection = cast(Connection, connection)
        survey.ask(host)
    return survey, found, [connection.kinds for connection in asked]


def pool(*ranks: int) -> dict[str, Any]:
    """A node with two images of each of ``ranks`` of generation 1."""
    images = [{"generation": 1, "rank": r, "step": s, "image": f"r{r}-{s}"} for r in ranks for s in (4, 5)]
    told = [{"generation": 1, "rank": rank, "description": EMPTY} for rank in ranks]
    return {"type": "pool", "images": images, "descriptions": told}


ENDED = {"type": "surveyed"}
EMPTY = Description((), 0).to_json()


def test_one_host_tells_of_its_nodes_images_once_no_trainer_there_writes_them() -> None:
    survey, (one, two, other), asked = surveyed("aab")
    survey.tell(two, ENDED)
    survey.tell(other, ENDED)
    assert asked == [["survey"], ["survey"], ["survey", "tell_pool"]]
    survey.tell(one, ENDED)
    assert asked == [["survey", "tell_pool"], ["survey"], ["survey", "tell_pool"]]
    survey.tell(other, pool(1))
    assert not survey.over(101.0)
    survey.tell(one, pool(0, 1))
    assert survey.over(101.0)
    inventory = Inventory()
    inventory.open_generation(1, 2)
    survey.fill(inventory)
    newest = inventory.newest_complete({"a", "b"})
    assert newest is not None
    assert (newest.step, newest.images_by_node()) == (5, {"a": {0: "r0-5", 1: "r1-5"}, "b": {1: "r1-5"}})
    assert list(inventory.unread) == [(1, 1), (1, 0)]  # each is read once, whoever had told of it first


def test_another_host_of_the_node_is_asked_when_the_one_that_looked_is_lost() -> None:
    survey, (one, two), asked = surveyed("aa")
    survey.tell(one, ENDED)
    survey.lose(one)
    assert asked[1] == ["survey"]
    survey.tell(two, ENDED)
    assert asked[1] == ["survey", "tell_pool"]
    survey.lose(two)
    assert survey.over(101.0)


def test_a_host_that_comes_meanwhile_lets_its_node_be_looked_at_again() -> None:
    survey, (one, two), asked = surveyed("aa")
    survey.lose(two)
    survey.tell(one, ENDED)
    survey.tell(one, pool(0))
    assert survey.over(101.0)
    survey.ask(two)
    assert not survey.over(101.0)
    survey.tell(two, ENDED)
    assert asked[0] == ["survey", "tell_pool", "tell_pool"]
    survey.tell(one, pool(0, 1))
    assert survey.over(101.0)


def test_an_answer_that_does_not_come_is_not_waited_for_for_ever() -> None:
    survey, (one, _), _ = surveyed("ab")
    survey.tell(one, ENDED)
    assert not survey.over(100.0 + SURVEY_SECONDS - 0.1)
    assert survey.over(100.0 + SURVEY_SECONDS)
