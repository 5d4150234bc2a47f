"""Storage in a local (or mounted) folder."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.storage.errors import AlreadyExists, NotFound, StorageError
from elastic_train.storage.store import Entry, Store, Unfinished, join

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer

TEMPORARY = ".tmp-"
"""Start of the names of files that are being written; they are never listed."""


class LocalStore(Store):
    """Objects are files; a file appears under its name only when it is complete and on disk."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).absolute()
        self.uri = str(self._root)

    def sub(self, path: str) -> Store:
        return LocalStore(self._root / self._key(path))

    def local_path(self, path: str) -> Path:
        return self._root / self._key(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._errors(path, "read"), self.local_path(path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = max(size - offset, 0) if length is None else length
            if offset + wanted > size:
                raise StorageError(
                    join(self.uri, path), f"bytes {offset} to {offset + wanted} wanted, but its size is {size}"
                )
            return _read_exactly(file.fileno(), offset, wanted)

    def size(self, path: str) -> int:
        with self._errors(path, "look up"):
            file = self.local_path(path)
            if file.is_dir():
                raise NotFound(join(self.uri, path), "is a folder, not an object")
            return file.stat().st_size

    def write(self, path: str, chunks: Iterable[Buffer], size_hint: int | None = None) -> int:
        with self._errors(path, "write"), self._temporary(path) as (temporary, fd):
            written = 0
            for chunk in chunks:
                written += _write_all(fd, chunk)
            os.fsync(fd)  # before the rename: a name must never stand for bytes that a power cut can take
            temporary.rename(self.local_path(path))
            _sync_folder(temporary.parent)
        return written

    def create(self, path: str, data: bytes) -> None:
        with self._errors(path, "create"), self._temporary(path) as (temporary, fd):
            _write_all(fd, data)
            os.fsync(fd)
            try:
                os.link(temporary, self.local_path(path))  # fails when the name exists, unlike rename
            except FileExistsError:
                raise AlreadyExists(join(self.uri, path), "exists already") from None
            _sync_folder(temporary.parent)

    def append(self, path: str, data: bytes) -> None:
        file = self.local_path(path)
        with self._errors(path, "append to"):
            fd = _open_new(file, os.O_APPEND)
            try:
                before = os.fstat(fd).st_size
                try:
                    _write_all(fd, data)
                except OSError:
                    os.ftruncate(fd, before)  # a full disk must not leave half a line in front of the next one
                    raise
            finally:
                os.close(fd)

    def list(self, prefix: str = "") -> list[Entry]:
        top = self._root / self._prefix(prefix).rpartition("/")[0]
        found: list[Entry] = []
        with self._errors(prefix, "list"):
            for folder, folders, files in os.walk(top, onerror=_raise_unless_missing):
                below = Path(folder).relative_to(self._root).as_posix()
                start = "" if below == "." else f"{below}/"
                folders[:] = [
                    name for name in folders if (start + name + "/").startswith(prefix[: len(start + name) + 1])
                ]
                for name in files:
                    if (start + name).startswith(prefix) and not name.startswith(TEMPORARY):
                        with suppress(FileNotFoundError):  # deleted by someone meanwhile
                            stat = (Path(folder) / name).stat()
                            found.append(Entry(start + name, stat.st_size, stat.st_mtime))
        return sorted(found)

    def delete(self, path: str) -> None:
        file = self.local_path(path)
        with self._errors(path, "delete"):
            file.unlink(missing_ok=True)
            for folder in file.parents:
                if folder == self._root or self._root not in folder.parents:
                    break
                try:
                    folder.rmdir()  # only goes when empty: object storage has no folders, so none stay here
                except OSError:
                    break

    def now(self) -> float:
        return time.time()

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        top = self._root / self._prefix(prefix).rpartition("/")[0]
        found: list[Unfinished] = []
        with self._errors(prefix, "list"):
            for file in top.rglob(f"{TEMPORARY}*"):
                path = file.relative_to(self._root).as_posix()
                if path.startswith(prefix):
                    with suppress(FileNotFoundError):  # completed meanwhile
                        found.append(Unfinished(path, file.stat().st_mtime, ""))
        return sorted(found, key=lambda write: write.path)

    def abandon(self, write: Unfinished) -> None:
        self.delete(write.path)

    @contextmanager
    def _temporary(self, path: str) -> Iterator[tuple[Path, int]]:
        """A new file in the folder of ``path``; whatever still has its name at the end is removed."""
        temporary = self.local_path(path).with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
        fd = _open_new(temporary, os.O_EXCL)
        try:
            yield temporary, fd
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _errors(self, path: str, verb: str) -> Iterator[None]:
        uri = join(self.uri, path)
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:  # the second: what would be its folder is a file
            if verb in ("read", "look up"):
                raise NotFound(uri, "no such object") from None
            raise StorageError(uri, f"cannot {verb} it: {error.strerror}") from error
        except OSError as error:
            raise StorageError(uri, f"cannot {verb} it: {error.strerror or error}") from error


def _open_new(file: Path, flags: int) -> int:
    """Opens ``file`` for writing, making its folder; again when a deleter takes the emptied folder away meanwhile."""
    for _ in range(100):
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return os.open(file, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    raise OSError(0, "its folder keeps being removed")


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _write_all(fd: int, chunk: Buffer) -> int:
    view = memoryview(chunk).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def _read_exactly(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    while len(data) < length:  # one read call returns 2 GiB at most
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise OSError(0, f"it ends at byte {offset + len(data)} while being read")
        data += more
    return data


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
