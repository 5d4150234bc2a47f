"""The choice of a fault's victim among the hosts that a job has at the moment. ``saboteur`` carries faults out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.config.faults import NODE_KINDS, Fault, Kind


@dataclass(frozen=True, slots=True)
class Victim:
    """Where a fault strikes: a node, and on it the host and its trainer if it is one of theirs."""

    node: str
    address: str
    host_pid: int
    trainer_pid: int | None
    label: str


def choose(fault: Fault, hosts: Sequence[Mapping[str, Any]], spared: Iterable[str] = ()) -> Victim | None:
    """The victim among the ``hosts`` of a status; None when there is none at this moment.

    Nodes in ``spared`` are never struck as a whole: the head, and the one on which the coordinator is.
    """
    there = [host for host in hosts if _fits(fault.kind, host)]
    if fault.kind in NODE_KINDS:
        spare = set(spared)
        nodes = {host["node"]: host for host in there if host["node"] not in spare}
        there = [nodes[node] for node in sorted(nodes)]
    if not there:
        return None
    host = there[int(fault.pick * len(there))]
    label = f"node {host['node'][:8]}"
    if fault.kind not in NODE_KINDS:
        place = "spare" if host["rank"] is None else f"rank {host['rank']}"
        label = f"{place}, host {host['id']} on {label}"
    return Victim(host["node"], host["address"], host["pid"], host["trainer_pid"], label)


def _fits(kind: Kind, host: Mapping[str, Any]) -> bool:
    return host["trainer_pid"] is not None if kind in (Kind.KILL_TRAINER, Kind.HANG) else True
