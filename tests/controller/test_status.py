from __future__ import annotations

from pathlib import Path
from typing import cast

from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.status import status_of
from elastic_train.controller.wire import Connection
from tests.jobs import make_job


def test_a_status_lists_as_many_hosts_as_are_asked_for_and_counts_all(tmp_path: Path) -> None:
    coordinator = Coordinator(make_job(tmp_path, tmp_path, "job"), "127.0.0.1", "token", lambda event: None)
    for number in range(5):
        about = {"pid": number, "node": "a", "address": "127.0.0.1", "bytes": ["127.0.0.1", 1], "pool": ""}
        coordinator.members.join(cast(Connection, None), about)
    few, everything = status_of(coordinator, [], 2), status_of(coordinator, [])
    assert ([host["id"] for host in few["hosts"]], few["host_count"]) == ([1, 2], 5)
    assert ([host["id"] for host in everything["hosts"]], everything["host_count"]) == ([1, 2, 3, 4, 5], 5)
