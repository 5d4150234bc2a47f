"""What chaos does, and when: schedules of faults (the same for the same seed), traces, and the choice of a victim.

No Ray in here; ``saboteur`` carries faults out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    """A kind of fault, as the command line names it."""

    KILL_TRAINER = "kill-trainer"
    KILL_HOST = "kill-host"
    KILL_NODE = "kill-node"
    HANG = "hang"
    PARTITION = "partition"
    DRAIN = "drain"
    KILL_COORDINATOR = "kill-coordinator"
    STORE_OUTAGE = "store-outage"


NODE_KINDS = (Kind.KILL_NODE, Kind.PARTITION, Kind.DRAIN)
"""Those that strike a whole node."""


class TraceError(ValueError):
    """A trace cannot be read; the sentence names the file and the line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to break ``at`` seconds after the start; ``pick`` in [0, 1) chooses the victim among those there are.

    ``seconds``: how long a partition or an outage lasts, or the notice of a drain.
    """

    at: float
    kind: Kind
    pick: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Victim:
    """Where a fault strikes: a node, and on it the host and its trainer if it is one of theirs."""

    node: str
    address: str
    host_pid: int
    trainer_pid: int | None
    label: str


def every(kind: Kind, period: float, duration: float, seed: int, seconds: float) -> list[Fault]:
    """One fault of ``kind`` per ``period`` seconds, the first after one period, none after ``duration``."""
    chance = random.Random(seed)
    count = int(duration / period + 1e-9)
    return [Fault(period * number, kind, chance.random(), seconds) for number in range(1, count + 1)]


LLAMA3_FAILURES: Mapping[str, tuple[int, Kind]] = {
    "faulty GPU": (148, Kind.KILL_TRAINER),
    "GPU HBM3 memory": (72, Kind.KILL_TRAINER),
    "software bug": (54, Kind.KILL_TRAINER),
    "network switch or cable": (35, Kind.HANG),
    "host maintenance": (32, Kind.DRAIN),
    "GPU SRAM memory": (19, Kind.KILL_TRAINER),
    "GPU system processor": (17, Kind.KILL_HOST),
    "NIC": (7, Kind.HANG),
    "NCCL watchdog timeouts": (7, Kind.HANG),
    "silent data corruption": (6, Kind.KILL_TRAINER),
    "GPU thermal interface and sensor": (6, Kind.KILL_TRAINER),
    "SSD": (3, Kind.KILL_HOST),
    "power supply": (3, Kind.KILL_NODE),
    "server chassis": (2, Kind.KILL_NODE),
    "IO expansion board": (2, Kind.KILL_NODE),
    "dependency": (2, Kind.STORE_OUTAGE),
    "CPU": (2, Kind.KILL_NODE),
    "system memory": (2, Kind.KILL_NODE),
}
"""Unexpected interruptions of Llama 3 405B's 54 days (arXiv:2407.21783, table 5), each with the nearest kind."""
LLAMA3_SECONDS = 54 * 86400.0


def llama3(duration: float, speed: float, seed: int, seconds: float) -> list[Fault]:
    """Failures at Llama 3's rate and in its mix for ``duration`` seconds, compressed ``speed``-fold.

    At 1,000-fold one per 11.1 s. The gaps are exponential, as those of independent failures are.
    """
    chance = random.Random(seed)
    causes = list(LLAMA3_FAILURES.values())
    total = sum(count for count, _ in causes)
    gap = LLAMA3_SECONDS / total / speed
    faults, at = [], chance.expovariate(1 / gap)
    while at <= duration:
        (kind,) = chance.choices([kind for _, kind in causes], weights=[count for count, _ in causes])
        faults.append(Fault(at, kind, chance.random(), seconds))
        at += chance.expovariate(1 / gap)
    return faults


def read_trace(path: Path, seed: int, seconds: float) -> list[Fault]:
    """Faults of a file of JSON lines: ``{"at": 11.1, "kind": "kill-trainer"}``, optionally with ``pick``, ``seconds``.

    Raises TraceError.
    """
    chance = random.Random(seed)
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    faults = [
        _parse(f"{path}, line {number}", line, chance.random(), seconds)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not faults:
        raise TraceError(f'{path} has no faults; write lines like {{"at": 11.1, "kind": "kill-trainer"}}')
    return sorted(faults, key=lambda fault: fault.at)


def _parse(where: str, line: str, pick: float, seconds: float) -> Fault:
    try:
        entry = json.loads(line)
    except ValueError:
        raise TraceError(f"{where} is not JSON: {line[:80]!r}") from None
    if not isinstance(entry, dict) or not {"at", "kind"} <= set(entry) <= {"at", "kind", "pick", "seconds"}:
        raise TraceError(f"{where}: an object with at, kind and optionally pick, seconds is expected: {line[:80]!r}")
    if entry["kind"] not in list(Kind):
        raise TraceError(f"{where}: kind={entry['kind']!r} is none of {', '.join(Kind)}")
    numbers = {"at": entry["at"], "pick": entry.get("pick", pick), "seconds": entry.get("seconds", seconds)}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise TraceError(f"{where}: {name}={value!r} must be a number of at least 0")
    if numbers["pick"] >= 1:
        raise TraceError(f"{where}: pick={numbers['pick']!r} must be below 1")
    return Fault(float(numbers["at"]), Kind(entry["kind"]), float(numbers["pick"]), float(numbers["seconds"]))


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
