"""Files of a local folder as input: links are followed, and what cannot be read is refused by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.data.errors import DataError
from elastic_train.storage.store import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def local_files(root: Path, wanted: Callable[[str], bool], entered: Callable[[str], bool]) -> list[Entry]:
    """Files below ``root`` whose path from there is ``wanted``, by name; none where ``root`` is no folder.

    Looks only into folders whose path is ``entered``. Raises :class:`DataError` for a wanted one that is no regular
    file (a link to nothing, a pipe, a device), and for folders that cannot be listed.
    """
    if not root.is_dir():
        return []
    return sorted(_entry(file, path) for path, file in _walk(root, entered) if wanted(path))


def local_file(file: Path) -> Entry | None:
    """A single file, called by its name; None for a folder, and where there is nothing.

    Raises :class:`DataError` for what is no regular file.
    """
    return _entry(str(file), file.name) if os.path.lexists(file) and not file.is_dir() else None


def _walk(root: Path, entered: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """(path from ``root``, file) of everything below it that is no folder."""
    todo: list[tuple[str, str, frozenset[tuple[int, int]]]] = [(str(root), "", frozenset())]
    while todo:
        folder, start, above = todo.pop()
        try:
            status = os.stat(folder)
            this = (status.st_dev, status.st_ino)
            if this in above:  # a link to a folder that it lies in: what is there is listed already
                continue
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError as error:
            raise DataError(f"input folder {folder} cannot be listed: {error.strerror}") from None
        for entry in entries:
            if os.path.isdir(entry.path):
                if entered(start + entry.name):
                    todo.append((entry.path, f"{start}{entry.name}/", above | {this}))
            else:
                yield start + entry.name, entry.path


def _entry(file: str, path: str) -> Entry:
    try:
        status = os.stat(file)
    except OSError as error:
        link = f"a link to {os.readlink(file)!r}, which cannot be read" if os.path.islink(file) else "not readable"
        raise DataError(f"input {file} is {link} ({error.strerror}); accepted are files") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"input {file} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}; accepted are files")
    return Entry(path, status.st_size, status.st_mtime)


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
