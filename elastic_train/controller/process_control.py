"""What a process asks of the kernel for itself: to end with its parent, and the name that others see."""

from __future__ import annotations

import ctypes
import signal
import sys

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
