"""Real control groups of version 1 for tests: limits that the kernel enforces. Skips where none can be made."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MOUNTED = Path("/sys/fs/cgroup")


@contextmanager
def cgroup(controller: str, **settings: str) -> Iterator[Path]:
    """A new group; in ``settings`` dots of a file's name are written as two underscores. Gone afterwards."""
    folder = MOUNTED / controller / f"elastic-train-test-{os.getpid()}"
    try:
        folder.mkdir()
        for name, value in settings.items():
            (folder / name.replace("__", ".")).write_text(value)
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no {controller} cgroup of version 1 can be made here: {error}")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """What is still in it goes to the group above; a process that is ending leaves by itself."""
    deadline = time.monotonic() + 30
    while True:
        for task in (folder / "cgroup.procs").read_text().split():
            try:
                (folder.parent / "cgroup.procs").write_text(task)
            except OSError:  # it has just ended
                continue
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
