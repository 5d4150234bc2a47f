"""Host records for tests of decisions that never touch a host's connection."""

from __future__ import annotations

from typing import cast

from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.wire import Connection


def host(number: int, node: str) -> HostRecord:
    """Host ``number`` on ``node``; its byte server has the port 9000 + number."""
    return HostRecord(
        number=number,
        connection=cast(Connection, None),
        pid=1000 + number,
        node=node,
        address="127.0.0.1",
        byte_address=("127.0.0.1", 9000 + number),
        pool=f"/dev/shm/pool-{node}",
        joined=0.0,
        ready_since=1.0,
    )


def hosts(nodes: str) -> list[HostRecord]:
    """One host per letter, on the node of that letter, numbered from 1."""
    return [host(number, node) for number, node in enumerate(nodes, start=1)]
