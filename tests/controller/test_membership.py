"""Who is cut off for its silence."""

from __future__ import annotations

from typing import Any, cast

from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.membership import Membership
from elastic_train.controller.wire import Connection
from tests.controller.records import host


class Line:
    """A connection that was last heard at ``last_heard``."""

    def __init__(self, last_heard: float) -> None:
        self.last_heard, self.aborted = last_heard, False

    def abort(self) -> None:
        self.aborted = True


def member(membership: Membership, number: int, last_heard: float) -> HostRecord:
    joined = host(number, "a")
    joined.connection = cast(Connection, Line(last_heard))
    membership.hosts[number] = joined
    return joined


def cut(membership: Membership) -> list[int]:
    return [number for number, one in membership.hosts.items() if one.silent and cast(Any, one.connection).aborted]


def test_a_process_that_joins_again_is_known_by_its_pid_and_node_whatever_number_it_says() -> None:
    """It may not have heard how it was called the last time."""
    membership = Membership(lambda event, **fields: None)
    first = member(membership, 3, 100.0)
    membership.by_node["a"] = [first]
    for number in (None, 1, 3):
        assert membership.superseded({"host": number, "pid": first.pid, "node": "a"}) is first
    assert membership.superseded({"host": 3, "pid": first.pid + 1, "node": "a"}) is None
    assert membership.superseded({"host": 3, "pid": first.pid, "node": "b"}) is None


def test_who_is_silent_for_a_lease_is_cut() -> None:
    membership = Membership(lambda event, **fields: None)
    member(membership, 1, 100.0)
    member(membership, 2, 103.0)
    membership.cut_silent(103.9, 4.0)
    assert cut(membership) == []
    membership.cut_silent(104.1, 4.0)
    assert cut(membership) == [1]


def test_nobody_is_cut_for_what_was_not_read_while_the_coordinator_itself_stood_still() -> None:
    membership = Membership(lambda event, **fields: None)
    one = member(membership, 1, 100.0)
    member(membership, 2, 100.0)
    membership.cut_silent(100.1, 4.0)
    membership.cut_silent(160.0, 4.0)
    assert cut(membership) == []
    one.connection.last_heard = 160.1  # what it had said meanwhile is read
    membership.cut_silent(160.25, 4.0)
    assert cut(membership) == [2]


def test_a_lease_shorter_than_the_time_between_two_looks_ends_all_the_same() -> None:
    membership = Membership(lambda event, **fields: None)
    member(membership, 1, 100.0)
    for look in (100.0, 100.25, 100.5):
        membership.cut_silent(look, 0.3)
    assert cut(membership) == [1]
