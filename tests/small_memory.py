"""A node whose memory file system is small: a real tmpfs under the pool of one "node" of a local job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_train.config.job import Job
from elastic_train.controller.pool import Pool, machine_wide


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a tmpfs."""
    try:
        with mounted(folder, 1e6):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@contextmanager
def mounted(folder: Path, nbytes: float) -> Iterator[None]:
    """A tmpfs of that size at ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={int(nbytes)}", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def grow(folder: Path, nbytes: float) -> None:
    """Make the tmpfs at ``folder`` larger."""
    _run("mount", "-o", f"remount,size={int(nbytes)}", str(folder))


def make_read_only(folder: Path) -> None:
    """Nothing can be written to the file system at ``folder`` any more."""
    _run("mount", "-o", "remount,ro", str(folder))


def pool_of(job: Job, node: str, run_id: str = "run0") -> Path:
    """The folder of a node's snapshots."""
    return Pool(job.snapshot.directory, machine_wide(job), run_id, node).path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
