"""Who leaves, from when, until when: decisions without a job."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.layout import Layout
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.preemption import Preemption
from elastic_train.controller.trouble import Trouble
from tests.controller.records import host, hosts


class Node:
    """A preemption with a clock that is set, and two hosts on node a and one on b."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.events: list[dict[str, Any]] = []
        self.preemption = Preemption(lambda event, **fields: self.events.append({"event": event, **fields}), self.clock)
        self.hosts = hosts("aab")
        self.generation = Generation(1, Layout(dp_shard=3), self.hosts, [[]] * 3, 0, Trouble("start", ""))

    def clock(self) -> float:
        return self.now

    def notice(self, seconds: float | None, reason: str = "spot") -> bool:
        return self.preemption.notice("a", seconds, reason, self.hosts[:2])

    def told(self, needed: bool) -> list[HostRecord]:
        return self.preemption.to_tell(self.hosts, lambda host: needed)


@pytest.fixture
def node() -> Node:
    return Node()


def test_without_a_notice_nobody_leaves(node: Node) -> None:
    assert node.preemption.cause(node.generation) is None
    assert not node.preemption.presses(node.generation)
    assert node.told(False) == []
    assert not node.preemption.left(node.hosts[0])


def test_hosts_of_the_node_are_not_usable_any_more_nor_are_newcomers(node: Node) -> None:
    assert node.notice(120.0)
    assert [host.usable for host in node.hosts] == [False, False, True]
    assert not any(host.full for host in node.hosts)
    newcomer, elsewhere = host(4, "a"), host(5, "c")
    node.preemption.joined(newcomer)
    node.preemption.joined(elsewhere)
    assert (newcomer.usable, elsewhere.usable) == (False, True)
    cause = node.preemption.cause(node.generation)
    assert cause is not None
    assert (cause.kind, cause.detail) == ("preemption", "node a is being taken away: spot")
    without = Generation(2, Layout(), node.hosts[2:], [[]], 0, cause)
    assert node.preemption.cause(without) is None
    assert not node.preemption.presses(without)


def test_a_notice_is_told_once_unless_the_end_comes_nearer(node: Node) -> None:
    assert node.notice(120.0)
    node.now += 5
    assert not node.notice(115.0)  # another host of the node
    assert not node.notice(None)
    assert node.notice(20.0)
    assert [(event["deadline_seconds"], event["event"]) for event in node.events] == [
        (120.0, "preemption_notice"),
        (20.0, "preemption_notice"),
    ]


def test_a_node_that_is_still_there_after_its_deadline_is_as_any_other(node: Node) -> None:
    node.notice(10.0)
    node.now += 11
    newcomer = host(4, "a")
    node.preemption.joined(newcomer)
    assert newcomer.usable
    assert node.notice(30.0)
    node.preemption.joined(newcomer)
    assert not newcomer.usable


@pytest.mark.parametrize(("seconds", "patient"), [(20.0, 10.0), (600.0, 30.0), (None, 30.0), (0.0, 0.0)])
def test_the_step_in_flight_has_a_part_of_the_time(node: Node, seconds: float | None, patient: float) -> None:
    node.notice(seconds)
    if patient:
        node.now += patient - 0.01
        assert not node.preemption.presses(node.generation)
        node.now += 0.01
    assert node.preemption.presses(node.generation)


@pytest.mark.parametrize(("seconds", "last"), [(10.0, 9.0), (120.0, 118.0)])
def test_hosts_end_when_nothing_is_needed_of_them_or_at_the_last_moment(
    node: Node, seconds: float, last: float
) -> None:
    node.notice(seconds)
    assert node.told(needed=True) == []
    node.now += last - 0.01
    assert node.told(needed=True) == []
    node.now += 0.01
    assert node.told(needed=True) == node.hosts[:2]
    assert node.told(needed=False) == []  # each once
    assert node.preemption.left(node.hosts[0])
    assert not node.preemption.left(node.hosts[2])
    (left,) = [event for event in node.events if event["event"] == "host_left"]
    assert (left["host"], left["seconds_left"]) == (1, round(seconds - last, 3))


def test_without_a_deadline_hosts_stay_as_long_as_they_are_needed(node: Node) -> None:
    node.notice(None)
    node.now += 1e6
    assert node.told(needed=True) == []
    assert node.told(needed=False) == node.hosts[:2]
    node.preemption.left(node.hosts[0])
    assert node.events[-1]["seconds_left"] is None
