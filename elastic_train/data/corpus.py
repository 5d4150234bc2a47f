"""Where documents come from: files in local folders or object storage, the Python library, the Python manual."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elastic_train.data.errors import DataError
from elastic_train.data.local_files import local_file, local_files
from elastic_train.storage.store import Entry, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.chat import ChatTemplate

    Listed = tuple[Store, tuple[str, ...], list[Entry]]
    """The store of an input, the pattern that its files match in it, and the files by name."""

Format = Literal["text", "jsonl", "parquet", "chat"]
"""``text``: a file is a document. ``jsonl``: a line is. ``parquet``: a row is. ``chat``: a line is a conversation."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LINES = (".jsonl", ".ndjson")
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
"""Folders of the standard library's tree that are tests or not part of it."""
ACCEPTED = "python-stdlib, python-doc, a file, a folder, a glob such as 'data/*.jsonl', or an s3:// prefix"


@dataclass(frozen=True, slots=True)
class InputFile:
    """``store``: URI of the store it is in, ``path`` in that store. ``name``: how the data set calls it, the same
    wherever the files lie. ``modified``: seconds since the epoch.
    """

    store: str
    path: str
    name: str
    size: int
    modified: float
    format: Format

    @property
    def uri(self) -> str:
        """For people."""
        return f"{self.store.rstrip('/')}/{self.path}"

    @property
    def compression(self) -> str | None:
        """``gzip``, ``zstd`` or None, by the end of the name."""
        return COMPRESSIONS.get(Path(self.path).suffix.lower())


@dataclass(frozen=True, slots=True)
class Source:
    """One input: the files of a store (its URI) whose paths, folder by folder, match ``pattern``."""

    store: str
    pattern: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in a fixed order (inputs as given, in each by name) and how documents are read from them.

    ``column``: field of a JSON line or column of a Parquet file that holds the text. ``chat``: renders conversations.
    ``sources``: what was asked for.
    """

    name: str
    files: tuple[InputFile, ...]
    sources: tuple[Source, ...]
    storage: StorageConfig | None = None
    column: str = "text"
    chat: ChatTemplate | None = None

    def takes(self, uri: str) -> bool:
        """Whether a file at ``uri`` would be one of the input's, were it there when the files are listed."""
        place = _resolved(uri)
        return any(
            place.startswith(f"{root}/") and _matches(place[len(root) + 1 :].split("/"), source.pattern)
            for source in self.sources
            for root in [_resolved(source.store).rstrip("/")]
        )


def open_corpus(
    *inputs: str,
    storage: StorageConfig | None = None,
    format: Format | None = None,
    column: str = "text",
    chat: ChatTemplate | None = None,
) -> Corpus:
    """The files of ``inputs``: each a file, a folder, a glob, an ``s3://`` prefix, ``python-stdlib`` or ``python-doc``.

    Without ``format`` names decide: ``*.jsonl`` and ``*.ndjson`` (also with ``.gz`` or ``.zst`` after it) are JSON
    lines, ``*.parquet`` is Parquet, everything else is text. Raises :class:`DataError` when there are no files.
    """
    if not inputs:
        raise DataError(f"no input is given; accepted are {ACCEPTED}")
    files: list[InputFile] = []
    sources: list[Source] = []
    for source, before in zip(inputs, _prefixes(inputs), strict=True):
        store, pattern, entries = _entries(source, storage)
        sources.append(Source(store.uri, pattern))
        files += [
            InputFile(
                store.uri, entry.path, before + entry.path, entry.size, entry.modified, format or _format(entry.path)
            )
            for entry in entries
        ]
    return Corpus(_name(inputs[0]), tuple(files), tuple(sources), storage, column, chat)


def _prefixes(inputs: Sequence[str]) -> list[str]:
    """What the names of the files of each input begin with, so that no two files have the same name."""
    names = [_name(source) for source in inputs]
    if len(names) == 1:
        return [""]
    if len(set(names)) == len(names):
        return [f"{name}/" for name in names]
    return [f"{number}/{name}/" for number, name in enumerate(names, start=1)]


def _resolved(uri: str) -> str:
    return uri if "://" in uri else os.path.realpath(uri)


def _name(source: str) -> str:
    plain = source.partition("://")[2] if "://" in source else str(Path(source).absolute())
    parts = [part for part in plain.split("/") if part and not _is_pattern(part)]
    name = parts[-1] if parts else "input"
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")  # it is text in the manifest


def _format(path: str) -> Format:
    name = path.lower()
    for end in COMPRESSIONS:
        name = name.removesuffix(end)
    if name.endswith(LINES):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _entries(source: str, storage: StorageConfig | None) -> Listed:
    """The files of one input, by name."""
    if source == "python-stdlib":
        return _below(Path(sysconfig.get_path("stdlib")), ".py", NOT_LIBRARY)
    if source == "python-doc":
        return _python_doc()
    if _is_pattern(source) and not ("://" not in source and os.path.lexists(source)):
        return _matching(source, storage)
    store = Store.open(source, storage)
    folder, _, name = store.uri.rstrip("/").rpartition("/")
    if not source.endswith("/") and name and not folder.endswith(":/"):
        beside = Store.open(folder or "/", storage)
        if (file := _single(beside, name)) is not None:
            return beside, (escape(name),), [file]
    entries = _listed(store, ("**",))
    if not entries:
        there = "holds no files" if "://" in source or Path(source).exists() else "is not there"
        raise DataError(f"input {source!r} {there}; accepted are {ACCEPTED}")
    return store, ("**",), entries


def _single(store: Store, name: str) -> Entry | None:
    local = store.local_path(name)
    if local is not None:
        return local_file(local)
    return next((entry for entry in store.list(name) if entry.path == name), None) if store.exists(name) else None


def _listed(store: Store, pattern: Sequence[str]) -> list[Entry]:
    """The files of a store whose paths match. (Object storage has objects that stand for folders.)"""

    def wanted(path: str) -> bool:
        return _matches(path.split("/"), pattern)

    if (local := store.local_path("any")) is not None:
        return local_files(local.parent, wanted, lambda folder: _leads_to(folder.split("/"), pattern))
    return [entry for entry in store.list() if not entry.path.endswith("/") and wanted(entry.path)]


def _python_doc() -> Listed:
    roots = sorted(Path("/usr/share/doc").glob("python3*/html/_sources"))
    if not roots:
        raise DataError(
            "corpus python-doc is not installed: no /usr/share/doc/python3*/html/_sources; install python3-doc"
        )
    return _below(roots[-1].resolve(), ".rst.txt", set())


def _below(root: Path, end: str, without: set[str]) -> Listed:
    entries = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without]  # there may be much below them
        for file in (Path(folder) / name for name in files if name.endswith(end)):
            stat = file.stat()
            entries.append(Entry(file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime))
    if not entries:
        raise DataError(f"{root} holds no *{end} files")
    return Store.open(str(root)), ("**", f"*{end}"), sorted(entries)


def _matching(source: str, storage: StorageConfig | None) -> Listed:
    scheme, separator, rest = source.rpartition("://")
    parts = rest.split("/")
    fixed = next(number for number, part in enumerate(parts) if _is_pattern(part))
    root = scheme + separator + "/".join(parts[:fixed])
    store = Store.open(root or ("/" if rest.startswith("/") else "."), storage)
    entries = _listed(store, parts[fixed:])
    if not entries:
        raise DataError(f"input {source!r} matches no files in {store.uri}; accepted are {ACCEPTED}")
    return store, tuple(parts[fixed:]), entries


def _is_pattern(part: str) -> bool:
    return any(sign in part for sign in "*?[")


def _matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """``*``, ``?`` and ``[...]`` stay inside a folder, as in a shell; ``**`` is any number of folders."""
    if not (path and pattern):
        return not (path or pattern)
    if pattern[0] == "**":
        return any(_matches(path[depth:], pattern[1:] or ["*"]) for depth in range(len(path)))
    return fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _leads_to(folder: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path that matches may be below the folder."""
    for name, part in zip(folder, pattern, strict=False):
        if part == "**":
            return True
        if not fnmatchcase(name, part):
            return False
    return len(folder) < len(pattern)
