"""Copies of remote record batches on a node's disk: named by content, bounded, shared by all processes of the node.

A file under its name is complete: it was written under another one and renamed. It may go at any moment (another
process needs the room), and what is read from it is checked, so nothing here has to survive a crash. Locks only keep
processes from fetching the same thing twice; they are the kernel's, and go with the process that holds them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Data = TypeVar("Data", bytes, memoryview)

FOLDERS = 16
"""Files are spread over so many folders, each with its share of the room."""
LOCKS = 64
LOCK_SECONDS = 10.0
"""Longest wait for another process that fetches the same: it may have been stopped while it held the lock."""
LOOK_AFTER = 32
"""A process looks what others have written once it has written this part of a folder's share itself."""
DEFAULT_BYTES = 16 * 2**30


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/elastic_train/data``, else below ``~/.cache``; without a home one that cannot be made."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry for the user, as in some containers
        folder = Path(os.devnull)
    return folder / "elastic_train" / "data"


@dataclass(slots=True)
class _Known:
    """What this process knows of a folder: its bytes at the last look, and those that it has written since."""

    bytes: int = 0
    written: int = 0
    looked: bool = False


@dataclass
class BatchCache:
    """At most about ``limit`` bytes in ``folder``; the least recently used files go first. Safe to use from threads.

    Where the folder cannot be written nothing is kept.
    """

    folder: Path = field(default_factory=default_folder)
    limit: int = DEFAULT_BYTES

    def __post_init__(self) -> None:
        self._known = [_Known() for _ in range(FOLDERS)]

    def get(self, name: str, make: Callable[[], bytes], is_right: Callable[[bytes], bool]) -> bytes:
        """The bytes kept under ``name``, made if they are not there or not right: by one of several processes."""
        return self._kept(name, make, is_right, _read)

    def mapped(
        self, name: str, make: Callable[[], bytes], is_right: Callable[[bytes | memoryview], bool]
    ) -> memoryview:
        """As ``get``, in memory that all processes of the node share. It stays when the file goes."""
        data = self._kept(name, make, is_right, _mapped)
        if isinstance(data, memoryview):
            return data
        kept = _mapped(self._file(name))
        return kept if kept is not None and is_right(kept) else memoryview(data)

    def _file(self, name: str) -> Path:
        return self.folder / f"{zlib.crc32(name.encode()) % FOLDERS:x}" / name

    def _kept(
        self,
        name: str,
        make: Callable[[], bytes],
        is_right: Callable[[Data], bool],
        read: Callable[[Path], Data | None],
    ) -> Data | bytes:
        file = self._file(name)
        data = read(file)
        if data is not None and is_right(data):
            return data
        with self._lock(name):
            data = read(file)
            if data is not None and is_right(data):
                return data
            made = make()
            self._keep(file, made)
        return made

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Keeps others from making the same; gives up where that takes too long or cannot be done."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / f"lock-{zlib.crc32(name.encode()) // FOLDERS % LOCKS:02}").open("w")
        except OSError:
            yield
            return
        with lock:
            deadline = time.monotonic() + LOCK_SECONDS
            while not _locked(lock.fileno()) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield

    def _keep(self, file: Path, data: bytes) -> None:
        temporary = file.with_name(f".tmp-{secrets.token_hex(8)}")
        with suppress(OSError):  # the disk is full, or not ours: the data is there all the same
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._make_room(file.parent, len(data))
                temporary.write_bytes(data)
                temporary.rename(file)
            finally:
                temporary.unlink(missing_ok=True)

    def _make_room(self, folder: Path, more: int) -> None:
        known, share = self._known[int(folder.name, 16)], self.limit // FOLDERS
        known.written += more
        if known.looked and known.bytes + known.written <= share and known.written * LOOK_AFTER <= share:
            return
        files = sorted(_files(folder))
        total = sum(size for _, size, _ in files) + more
        for _, size, path in files:
            if total <= share:
                break
            with suppress(FileNotFoundError):  # another process was quicker
                os.unlink(path)
            total -= size
        known.bytes, known.written, known.looked = total, 0, True


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """(time of the last use, bytes, path) of each file, those of processes that were killed included."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                stat = entry.stat()
                yield stat.st_mtime, stat.st_size, entry.path


def _read(file: Path) -> bytes | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    _mark_used(file)
    return data


def _mapped(file: Path) -> memoryview | None:
    try:
        with pa.memory_map(str(file)) as opened:
            data = memoryview(opened.read_buffer()).cast("B")
    except (OSError, pa.ArrowException):
        return None
    _mark_used(file)
    return data


def _mark_used(file: Path) -> None:
    with suppress(OSError):  # it is another user's, or another process has removed it
        os.utime(file)


def _locked(descriptor: int) -> bool:
    """False: another process has it. Where there are no locks, as on some network file systems, nobody does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
