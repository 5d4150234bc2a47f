"""The memory limit of this process's cgroup (version 1 or 2), and whether the kernel has killed somebody for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 has no word for it, but a number near 2**63."""
ADVICE = (
    "give the hosts more memory, or make a layout need less of it: more hosts, training.recompute, a smaller "
    "training.micro_batch; with hosts.memory no layout is taken that is estimated to need more"
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a cgroup says of its memory. Bytes; None: not known, or no limit."""

    kills: int
    """processes of it that the kernel has killed for want of memory"""
    limit: int | None
    peak: int | None


class MemoryCgroup:
    """One memory cgroup.

    Args:
        folder: of the cgroup.
        top: where the hierarchy is mounted.
        unified: whether it is of version 2.
    """

    def __init__(self, folder: Path, top: Path, *, unified: bool) -> None:
        self._folder, self._top, self._unified = folder, top, unified

    @classmethod
    def of_this_process(cls, proc: Path = Path("/proc/self")) -> MemoryCgroup | None:
        """None where there is none, or it cannot be read."""
        try:
            places, mounts = (proc / "cgroup").read_text(), (proc / "mounts").read_text()
        except OSError:
            return None
        paths = {kind: path for _, kind, path in (line.split(":", 2) for line in places.splitlines())}
        for _, top, kind, options, *_ in (line.split() for line in mounts.splitlines()):
            if kind == "cgroup2" and "" in paths:
                found = cls(_inside(top, paths[""]), Path(top), unified=True)
            elif kind == "cgroup" and "memory" in options.split(","):
                path = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
                found = cls(_inside(top, path), Path(top), unified=False)
            else:
                continue
            if found.read() is not None:
                return found
        return None

    def read(self) -> MemoryUse | None:
        """None where the kernel does not count kills (the root of version 2)."""
        events = _counts(self._folder / ("memory.events" if self._unified else "memory.oom_control"))
        if "oom_kill" not in events:
            return None
        peak = _number(self._folder / ("memory.peak" if self._unified else "memory.max_usage_in_bytes"))
        return MemoryUse(events["oom_kill"], self._limit(), peak)

    def _limit(self) -> int | None:
        """Of the cgroup and those it is in."""
        if self._unified:
            above = [self._folder, *self._folder.parents]
            inside = [folder for folder in above if folder.is_relative_to(self._top)]
            limits = [limit for folder in inside if (limit := _number(folder / "memory.max")) is not None]
        else:
            limits = [_counts(self._folder / "memory.stat").get("hierarchical_memory_limit", _NO_LIMIT)]
        return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


class MemoryWatch:
    """Tells whether a trainer that was killed was killed for want of memory."""

    def __init__(self, cgroup: MemoryCgroup | None) -> None:
        self._cgroup = cgroup
        self.begin()

    def begin(self) -> None:
        """A trainer begins."""
        use = self._cgroup.read() if self._cgroup is not None else None
        self._kills = use.kills if use is not None else 0

    def verdict(self) -> str | None:
        """A sentence, when the kernel has killed a process of this cgroup since ``begin``."""
        use = self._cgroup.read() if self._cgroup is not None else None
        if use is None or use.kills <= self._kills:
            return None
        limit = "no limit is set" if use.limit is None else f"the limit of its cgroup is {use.limit} bytes"
        peak = "" if use.peak is None else f", the most it ever used {use.peak} bytes"
        return f"killed by the kernel for want of memory: {limit}{peak}; {ADVICE}"


def _inside(top: str, path: str) -> Path:
    """In a container the path may be that of the machine: then the mount is the cgroup."""
    folder = Path(top) / path.lstrip("/")
    return folder if folder.is_dir() else Path(top)


def _counts(file: Path) -> dict[str, int]:
    """Lines of a name and a number; {} when the file cannot be read."""
    try:
        return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _number(file: Path) -> int | None:
    """None when it is ``max`` or cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
