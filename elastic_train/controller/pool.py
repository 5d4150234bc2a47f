"""The snapshot pool of a node: a folder in shared memory that all hosts of one job on that node use together.

It outlives trainers and single hosts. Each host leaves a marker with its pid; the last one out removes the folder,
and whoever comes later on the machine removes folders of which every owner has been dead for a while: killed hosts
are replaced within that time, and the new ones need what is in there. The next submission of the same job need not
wait: it has taken over from the runs before it. All of this happens under a lock, so that nobody enters a folder that
another host is about to remove.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from elastic_train.config.job import Job
from elastic_train.controller.job_folder import job_uri

logger = logging.getLogger(__name__)

PREFIX = "elastic_train-"
PATIENCE_SECONDS = 180.0
"""A folder stays for so long after all of its owners were first found dead."""
_DEAD = "found-dead"
"""Marker in such a folder; its time of modification tells since when."""


def _marker(pid: int) -> str:
    """Name of the marker of a living process; ValueError when there is none.

    The second number is the start of the process in clock ticks since the machine's boot: two processes that have the
    same pid one after the other differ in it, and it stays the same when the machine's clock is set.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        raise ValueError(f"there is no process {pid}") from None
    if fields[0] in (b"Z", b"X"):
        raise ValueError(f"process {pid} has ended; its parent has not noticed yet")
    return f"owner-{pid}-{int(fields[19])}"


def _alive(marker: str) -> bool:
    try:
        return marker == _marker(int(marker.split("-")[1]))
    except ValueError:
        return False


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process at a time; a lock of the kernel's, which ends with its holder."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def machine_wide(job: Job) -> str:
    """A name of the job that no other job on the machine has: two storages may have a job of one name."""
    return f"{job.name}-{xxhash.xxh32_hexdigest(job_uri(job).encode())}"


class Pool:
    """This host's membership in its node's pool; ``job`` as ``machine_wide`` names it.

    Raises:
        OSError: the memory file system does not take the folder.
    """

    def __init__(self, directory: str, job: str, run_id: str, node_id: str) -> None:
        self._root = Path(directory)
        self._job, self._run = f"{PREFIX}{job}-", f"{PREFIX}{job}-{run_id}-"
        self.path = self._root / f"{self._run}{node_id[:12]}"
        self._own = _marker(os.getpid())

    def enter(self) -> None:
        """Sweep what the dead of other runs left on this machine, then open this node's folder.

        Folders of this run are left alone: where hosts have died their snapshots may be the last ones.
        """
        with _locked(self._root):
            _sweep(self._root, 0.0, keep=self._run, only=self._job)
            _sweep(self._root, PATIENCE_SECONDS, keep=self._run)
            self.path.mkdir(mode=0o700, exist_ok=True)
            (self.path / self._own).touch()
            (self.path / _DEAD).unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove our marker, and the folder with it when nobody living uses it any more."""
        with _locked(self._root):
            (self.path / self._own).unlink(missing_ok=True)
            if not _owners_alive(self.path):
                shutil.rmtree(self.path, ignore_errors=True)


def _owners_alive(folder: Path) -> bool:
    return any(_alive(marker.name) for marker in folder.glob("owner-*"))


def sweep(root: Path, ended: str = "", patience: float = PATIENCE_SECONDS) -> list[Path]:
    """Remove the pools under ``root`` (there may be no such folder) that nobody needs; returns them.

    Those of the run ``ended`` ("job-run_id") at once unless an owner lives, all others once their owners
    have been dead for ``patience`` seconds.
    """
    if not root.is_dir():
        return []
    with _locked(root):
        over = _sweep(root, 0.0, only=f"{PREFIX}{ended}-") if ended else []
        return over + _sweep(root, patience)


def _sweep(root: Path, patience: float, keep: str | None = None, only: str = PREFIX) -> list[Path]:
    """``keep``: how the names of the folders begin that are not to be touched; ``only``: of those that are."""
    folders = [
        folder
        for folder in root.glob(f"{only}*/")
        if folder.stat().st_uid == os.getuid() and (keep is None or not folder.name.startswith(keep))
    ]
    dead = [folder for folder in folders if not _owners_alive(folder) and _seconds_dead(folder) >= patience]
    for folder in dead:
        logger.info("removing %s, whose owners are dead", folder)
        shutil.rmtree(folder, ignore_errors=True)
    return dead


def _seconds_dead(folder: Path) -> float:
    """Since the owners were first found dead, which may be now."""
    marker = folder / _DEAD
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return time.time() - marker.stat().st_mtime
    return 0.0
