"""The storage interface: objects named by slash-separated paths under one URI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from elastic_train.storage.errors import NotFound, StorageError, WrongSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from elastic_train.config.operation import StorageConfig


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One stored object: path relative to the store, size in bytes, seconds since the epoch by the storage's clock."""

    path: str
    size: int
    modified: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A write that was begun and neither completed nor given up: an open multipart upload, or a temporary file."""

    path: str
    started: float
    token: str
    """What ``abandon`` needs to know of it."""


class Store(ABC):
    """Objects under one URI prefix.

    Paths are relative, separated by ``/`` and taken literally (spaces and ``+`` are ordinary characters). Every
    method may raise :class:`StorageError`; credentials never appear in its message. Stores are safe to use from
    several threads.
    """

    uri: str
    """Where the store is, in a form that :meth:`open` takes."""

    @staticmethod
    def open(uri: str, config: StorageConfig | None = None) -> Store:
        """The store at a local path, a ``file://`` URI or an ``s3://bucket/prefix`` URI. Makes no request.

        ``config`` gives the endpoint, region, timeout and retry budget of S3; its own ``uri`` is not used here.
        """
        scheme, separator, rest = uri.partition("://")
        if not separator:
            return _open_local(uri)
        if scheme == "file":
            parts = urlsplit(uri)
            if parts.netloc not in ("", "localhost"):
                raise WrongSettings(uri, f"file URI names the host {parts.netloc!r}; accepted is file:///absolute/path")
            return _open_local(unquote(uri[len("file://") + len(parts.netloc) :]))
        if scheme == "s3":
            from elastic_train.storage.s3 import open_s3

            return open_s3(rest, config)
        raise WrongSettings(
            uri, f"unknown scheme {scheme!r}; accepted are a local path, file:// and s3://bucket/prefix"
        )

    @property
    def retries(self) -> dict[str, int]:
        """How often requests were repeated so far, by cause ("SlowDown", "broken connection"), by this store and all
        that it shares a client with; {} where nothing is ever repeated.
        """
        return {}

    @abstractmethod
    def sub(self, path: str) -> Store:
        """The store of everything below ``path``."""

    @abstractmethod
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes ``[offset, offset + length)``, without ``length`` to the end; an error when it ends before that.

        Whole objects come as they were written. Of a part only the length is certain: who reads one compares a
        checksum, or calls :meth:`read_agreed`.
        """

    def read_buffer(self, path: str, offset: int = 0, length: int | None = None) -> bytearray:
        """As :meth:`read`, in memory that the caller may write to."""
        return bytearray(self.read(path, offset, length))

    def read_agreed(self, path: str, offset: int, length: int) -> bytes:
        """Bytes ``[offset, offset + length)`` of which the caller has no checksum.

        Over a network that has none either (plain HTTP) they are read until two answers in a row agree.
        """
        return self.read(path, offset, length)

    @abstractmethod
    def size(self, path: str) -> int:
        """Size in bytes; :class:`NotFound` when there is no such object."""

    def exists(self, path: str) -> bool:
        """Whether there is an object at ``path``."""
        try:
            self.size(path)
        except NotFound:
            return False
        return True

    @abstractmethod
    def write(self, path: str, chunks: Iterable[Buffer], size_hint: int | None = None) -> int:
        """Creates or replaces an object, as a whole or not at all; returns its size in bytes.

        ``chunks`` is read once, in order. ``size_hint`` (total bytes, may be an upper bound) sizes the parts of an S3
        upload, which may have 10,000 at most; without it an object is limited to 78 GiB.
        """

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Creates an object unless it exists (:class:`AlreadyExists`); of several callers exactly one succeeds."""

    @abstractmethod
    def append(self, path: str, data: bytes) -> None:
        """Adds to the end of a local file; S3 cannot, use :class:`~elastic_train.storage.json_lines.JsonLines`."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[Entry]:
        """Every object whose path starts with the string ``prefix``, at any depth, sorted by path."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Removes an object; one that is not there is no error."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the epoch by the clock that stamps the entries, which may differ from this machine's."""

    @abstractmethod
    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        """Writes below ``prefix`` that are under way or were never ended; they take room and are not listed."""

    @abstractmethod
    def abandon(self, write: Unfinished) -> None:
        """Ends a write of :meth:`unfinished` and frees its room; one that is over meanwhile is no error."""

    def local_path(self, path: str) -> Path | None:
        """The file that holds ``path`` (for memory mapping), None where objects are not files."""
        self._key(path)
        return None

    def _key(self, path: str) -> str:
        if not path or any(part in ("", ".", "..") for part in path.split("/")):
            raise StorageError(
                self.uri, f"path {path!r} is not accepted; give a relative path without '.', '..' and empty parts"
            )
        return path

    def _prefix(self, prefix: str) -> str:
        if any(part in (".", "..") for part in prefix.split("/")):
            raise StorageError(self.uri, f"prefix {prefix!r} is not accepted; '.' and '..' name no object")
        return prefix


def join(uri: str, path: str) -> str:
    """``uri/path`` with one slash between."""
    return f"{uri.rstrip('/')}/{path}"


def _open_local(path: str) -> Store:
    from elastic_train.storage.local import LocalStore

    if not path:
        raise WrongSettings("''", "the storage URI is empty; give a local path, file:// or s3://bucket/prefix")
    return LocalStore(path)
