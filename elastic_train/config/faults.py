"""What breaks, and when: schedules of faults (the same for the same seed), traces, Llama 3's failures.

Chaos carries them out on a running job, the simulator reckons with them. Plain Python: every layer may import it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


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


_FIELDS = {"at", "kind", "pick", "seconds", "node", "away"}
_LATEST = 1e9
"""seconds, 31 years"""


class TraceError(ValueError):
    """A trace cannot be read; the sentence names the file and the line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to break ``at`` seconds after the start; ``pick`` in [0, 1) chooses the victim among those there are.

    Attributes:
        seconds: how long a partition or an outage lasts, or the notice of a drain.
        node: the name of the node that it strikes, of a trace of a real cluster; others have ``pick`` alone.
        away: seconds until the struck node is there again, of such a trace.
    """

    at: float
    kind: Kind
    pick: float
    seconds: float
    node: str | None = None
    away: float | None = None


def every(kind: Kind, period: float, duration: float, seed: int, seconds: float) -> list[Fault]:
    """One fault of ``kind`` per ``period`` seconds, the first after one period, none after ``duration``."""
    chance = random.Random(seed)
    count = int(duration / period + 1e-9)
    return [Fault(period * number, kind, chance.random(), seconds) for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class Interruption:
    """One of the causes for which a job was interrupted."""

    count: int
    kind: Kind
    """the nearest kind of fault"""
    repair: bool = False
    """the node cannot be used until it is repaired: so for hardware; what chaos breaks is whole again"""


LLAMA3_FAILURES: Mapping[str, Interruption] = {
    "faulty GPU": Interruption(148, Kind.KILL_TRAINER, repair=True),
    "GPU HBM3 memory": Interruption(72, Kind.KILL_TRAINER, repair=True),
    "software bug": Interruption(54, Kind.KILL_TRAINER),
    "network switch or cable": Interruption(35, Kind.HANG, repair=True),
    "host maintenance": Interruption(32, Kind.DRAIN, repair=True),
    "GPU SRAM memory": Interruption(19, Kind.KILL_TRAINER, repair=True),
    "GPU system processor": Interruption(17, Kind.KILL_HOST, repair=True),
    "NIC": Interruption(7, Kind.HANG, repair=True),
    "NCCL watchdog timeouts": Interruption(7, Kind.HANG),
    "silent data corruption": Interruption(6, Kind.KILL_TRAINER, repair=True),
    "GPU thermal interface and sensor": Interruption(6, Kind.KILL_TRAINER, repair=True),
    "SSD": Interruption(3, Kind.KILL_HOST, repair=True),
    "power supply": Interruption(3, Kind.KILL_NODE, repair=True),
    "server chassis": Interruption(2, Kind.KILL_NODE, repair=True),
    "IO expansion board": Interruption(2, Kind.KILL_NODE, repair=True),
    "dependency": Interruption(2, Kind.STORE_OUTAGE),
    "CPU": Interruption(2, Kind.KILL_NODE, repair=True),
    "system memory": Interruption(2, Kind.KILL_NODE, repair=True),
}
"""Unexpected interruptions of Llama 3 405B's 54 days (arXiv:2407.21783, table 5)."""
LLAMA3_SECONDS = 54 * 86400.0


def llama3(duration: float, speed: float, seed: int, seconds: float) -> list[Fault]:
    """Failures at Llama 3's rate and in its mix for ``duration`` seconds, compressed ``speed``-fold.

    At 1,000-fold one per 11.1 s. The gaps are exponential, as those of independent failures are.
    """
    chance = random.Random(seed)
    causes = list(LLAMA3_FAILURES.values())
    total = sum(cause.count for cause in causes)
    gap = LLAMA3_SECONDS / total / speed
    faults, at = [], chance.expovariate(1 / gap)
    while at <= duration:
        (kind,) = chance.choices([cause.kind for cause in causes], weights=[cause.count for cause in causes])
        faults.append(Fault(at, kind, chance.random(), seconds))
        at += chance.expovariate(1 / gap)
    return faults


def read_trace(path: Path, seed: int, seconds: float) -> list[Fault]:
    """Faults of a file of JSON lines: ``{"at": 11.1, "kind": "kill-trainer"}``, optionally with ``pick``, ``seconds``,
    ``node`` and ``away``.

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
    if not isinstance(entry, dict) or not {"at", "kind"} <= set(entry) <= _FIELDS:
        raise TraceError(
            f"{where}: an object with at, kind and optionally pick, seconds, node, away is expected: {line[:80]!r}"
        )
    if entry["kind"] not in list(Kind):
        raise TraceError(f"{where}: kind={entry['kind']!r} is none of {', '.join(Kind)}")
    numbers = {"at": entry["at"], "pick": entry.get("pick", pick), "seconds": entry.get("seconds", seconds)}
    numbers |= {"away": entry["away"]} if "away" in entry else {}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise TraceError(f"{where}: {name}={value!r} must be a number of at least 0")
        if value > _LATEST:
            raise TraceError(f"{where}: {name}={value!r} must be at most {_LATEST:g} seconds, 31 years")
    if numbers["pick"] >= 1:
        raise TraceError(f"{where}: pick={numbers['pick']!r} must be below 1")
    node = entry.get("node")
    if node is not None and not (isinstance(node, str) and node):
        raise TraceError(f"{where}: node={node!r} must be the name of a node")
    away = float(numbers["away"]) if "away" in numbers else None
    return Fault(
        float(numbers["at"]), Kind(entry["kind"]), float(numbers["pick"]), float(numbers["seconds"]), node, away
    )
