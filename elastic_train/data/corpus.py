"""Where documents come from: the Python library, the Python manual, or one's own text files."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.data.errors import DataError
from elastic_train.data.manifest import Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library's tree that are tests or not part of it."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its name in the corpus (a path with slashes)."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order (by name); the same files give the same documents on every machine."""

    name: str
    root: Path
    names: tuple[str, ...]
    skipped: list[Skipped] = field(default_factory=list)
    """Documents that the last complete :meth:`documents` left out: empty or not UTF-8."""

    def documents(self) -> Iterator[Document]:
        """The documents; every file is either yielded or listed in :attr:`skipped`."""
        self.skipped.clear()
        for name in self.names:
            try:
                data = (self.root / name).read_bytes()
            except OSError as error:
                raise DataError(f"cannot read {self.root / name}: {error.strerror}") from error
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                self.skipped.append(Skipped(name=name, reason=f"not UTF-8 (byte {error.start})"))
                continue
            if not text.strip():
                self.skipped.append(Skipped(name=name, reason="empty"))
                continue
            yield Document(name, text)

    def total_bytes(self) -> int:
        """Size of all files."""
        return sum((self.root / name).stat().st_size for name in self.names)


def open_corpus(source: str) -> Corpus:
    """The corpus ``python-stdlib``, ``python-doc``, or the text file or folder of text files at a path."""
    if source == "python-stdlib":
        return _python_stdlib()
    if source == "python-doc":
        return _python_doc()
    path = Path(source)
    if path.is_file():
        return Corpus(path.name, path.parent, (path.name,))
    if not path.is_dir():
        raise DataError(f"corpus {source!r} is not there; give python-stdlib, python-doc, or a text file or folder")
    return Corpus(path.absolute().name, path, _found(path, _files(path, set()), "files"))


def _python_stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    return Corpus(
        "python-stdlib", root, _found(root, (n for n in _files(root, NOT_LIBRARY) if n.endswith(".py")), "*.py files")
    )


def _python_doc() -> Corpus:
    roots = sorted(Path("/usr/share/doc").glob("python3*/html/_sources"))
    if not roots:
        raise DataError(
            "corpus python-doc is not installed: no /usr/share/doc/python3*/html/_sources; install python3-doc"
        )
    root = roots[-1].resolve()
    return Corpus(
        "python-doc", root, _found(root, (n for n in _files(root, set()) if n.endswith(".rst.txt")), "*.rst.txt files")
    )


def _files(root: Path, without: set[str]) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        below = Path(folder).relative_to(root)
        yield from ((below / name).as_posix() for name in files)


def _found(root: Path, names: Iterator[str], what: str) -> tuple[str, ...]:
    found = tuple(sorted(names))
    if not found:
        raise DataError(f"{root} holds no {what}")
    return found
