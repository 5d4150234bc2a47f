"""The snapshot pool of a node: a folder in shared memory that all hosts of one job on that node use together.

It outlives trainers and single hosts. Each host leaves a marker with its pid; the last one out removes the folder, and
whoever comes later on the machine removes folders of which every owner is dead.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

PREFIX = "elastic_train-"
_NEWBORN_SECONDS = 60.0
"""A folder without a marker may be one that another host is just creating."""


def _marker(pid: int) -> str:
    return f"owner-{pid}-{int(psutil.Process(pid).create_time() * 100)}"


def _alive(marker: str) -> bool:
    try:
        return marker == _marker(int(marker.split("-")[1]))
    except (psutil.NoSuchProcess, ValueError, IndexError):
        return False


class Pool:
    """This host's membership in its node's pool.

    Raises:
        OSError: the memory file system does not take the folder.
    """

    def __init__(self, directory: str, job: str, run_id: str, node_id: str) -> None:
        self._root = Path(directory)
        self.path = self._root / f"{PREFIX}{job}-{run_id}-{node_id[:12]}"
        self._own = _marker(os.getpid())

    def enter(self) -> None:
        """Sweep what the dead left on this machine, then open this node's folder."""
        sweep(self._root, keep=self.path)
        self.path.mkdir(mode=0o700, exist_ok=True)
        (self.path / self._own).touch()

    def leave(self) -> None:
        """Remove our marker, and the folder with it when nobody living uses it any more."""
        (self.path / self._own).unlink(missing_ok=True)
        if not _owners_alive(self.path):
            shutil.rmtree(self.path, ignore_errors=True)


def _owners_alive(folder: Path) -> bool:
    return any(_alive(marker.name) for marker in folder.glob("owner-*"))


def sweep(root: Path, keep: Path | None = None) -> list[Path]:
    """Remove the pools under ``root`` whose every owner is dead; returns them."""
    removed = []
    for folder in root.glob(f"{PREFIX}*"):
        if folder == keep or _owners_alive(folder):
            continue
        try:
            newborn = not any(folder.glob("owner-*")) and time.time() - folder.stat().st_mtime < _NEWBORN_SECONDS
        except FileNotFoundError:
            continue  # its last owner has just removed it
        if not newborn:
            logger.info("removing %s, whose owners are dead", folder)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
