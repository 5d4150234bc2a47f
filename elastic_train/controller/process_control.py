"""What a process asks of the kernel for itself: to end with its parent, and the name that others see."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have signal ``number`` sent to this process when the *thread* that started it ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def name_process(name: str) -> None:
    """Name shown by ``ps`` and ``top`` (at most 15 bytes)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def process_state(pid: int) -> str:
    """One letter, as in /proc: R runs, S sleeps, D is blocked in the kernel, T is stopped, ...; "" where not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before it may have anything in it


def own_time() -> tuple[float, float]:
    """Of this thread, in seconds: the time it ran or was ready to run, and how much of that it waited for a CPU."""
    try:
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except OSError:
        return time.thread_time(), 0.0
    return (int(ran) + int(waited)) * 1e-9, int(waited) * 1e-9


def prefer_to_be_killed() -> None:
    """When memory runs out the kernel ends this process before those that are to outlive it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
