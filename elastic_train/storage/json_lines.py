"""Append-only logs of JSON objects, one per line, in any store.

A writer says the format of its lines in ``format_version`` of its first one. Logs from before that say nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from elastic_train.storage.errors import NotFound, StorageError
from elastic_train.storage.formats import KEY, require_known
from elastic_train.storage.store import Store, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

UPLOAD_SHARE = 0.1
"""Most of the time that may go into putting a growing S3 object again."""
FORMAT_VERSION = 1
"""Of the lines of a job's logs."""
_BLOCK_BYTES = 1 << 16


def read_json_lines(store: Store, path: str) -> list[dict[str, Any]]:
    """The objects of a log, [] when there is none. A last line that was torn by a crash is left out.

    Raises FutureFormat for lines of a later release, StorageError for what is not JSON.
    """
    try:
        data = store.read(path)
    except NotFound:
        return []
    return _checked(store, path, enumerate(_whole_lines(data), start=1))


def _checked(store: Store, path: str, numbered: Iterable[tuple[int, bytes]]) -> list[dict[str, Any]]:
    values = [(number, _parse(store, path, f"line {number}", line)) for number, line in numbered]
    for number, value in values:
        require_known(f"line {number} of {join(store.uri, path)}", value.get(KEY), FORMAT_VERSION)
    return [value for _, value in values]


def _whole_lines(data: bytes) -> list[bytes]:
    """Lines with their newline. A last line without one counts when it is a whole object after all."""
    lines = data.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        try:
            json.loads(lines[-1])
            lines[-1] += b"\n"
        except ValueError:
            lines.pop()
    return lines


def _backwards(store: Store, path: str, size: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file of ``size`` bytes from the last to the first, with the offset of each."""
    tail = b""
    while size or tail:
        begin = tail.rfind(b"\n", 0, max(len(tail) - 1, 0)) + 1
        if not begin and size:
            before = max(0, size - _BLOCK_BYTES)
            tail, size = store.read(path, before, size - before) + tail, before
            continue
        yield size + begin, tail[begin:]
        tail = tail[:begin]


def _parse(store: Store, path: str, where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise StorageError(join(store.uri, path), f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StorageError(join(store.uri, path), f"{where} is not a JSON object")
    return value


class JsonLines:
    """One writer of a log; :meth:`append` never raises and never waits for the network.

    On a file system every line is appended at once (it outlives the process, not a power cut). In S3, which has no
    append, a background thread puts the whole object again: at most every ``interval_seconds``, less often once a
    put takes longer than a tenth of that. A process that is killed loses the lines since the last put that was
    answered, never one before; what must be there afterwards is flushed (the steps of a checkpoint before its commit).
    Lines that could not be written stay in memory and are tried again; :meth:`flush` and :meth:`close` say so.
    """

    def __init__(
        self, store: Store, path: str, interval_seconds: float = 5.0, format_version: int | None = None
    ) -> None:
        """``format_version`` is what the first line says of all of them; None: nothing is said.

        Raises FutureFormat when a later release has written the log, StorageError when it cannot be read.
        """
        self.uri = join(store.uri, path)
        self._store, self._path, self._interval = store, path, interval_seconds
        self._changed = threading.Condition()
        self._pending: list[bytes] = []  # a file: lines that could not be appended
        self._error: StorageError | None = None
        self._closed = self._abandoned = False
        self._format_version, self._format_told = format_version, False
        self._local = store.local_path(path) is not None
        self._lines: list[bytes] = []  # S3: what the object shall hold
        self._changes = self._stored = 0  # S3: changes of the lines so far, and how many of them the object has
        self._thread: threading.Thread | None = None
        self._urgent = False
        self._puts = self._failed_put = 0  # number of the newest put, and of the newest that failed
        self._open()

    def _open(self) -> None:
        """Takes over what is there; a line that a crash has torn is cut off, or the next one would continue it."""
        try:
            data = self._store.read(self._path)
        except NotFound:
            return
        lines = _whole_lines(data)
        told = f'"{KEY}":'.encode()
        _checked(self._store, self._path, ((n, line) for n, line in enumerate(lines, start=1) if told in line))
        if b"".join(lines) != data:
            self._store.write(self._path, lines)
        if not self._local:
            self._lines = lines

    @property
    def error(self) -> StorageError | None:
        """Why the last write failed; None after one that worked."""
        return self._error

    @property
    def unsaved(self) -> int:
        """At most so many of the last lines are not in storage yet."""
        with self._changed:
            return len(self._pending) if self._local else self._changes - self._stored

    def append(self, line: dict[str, Any], *, soon: bool = False) -> None:
        """Adds one object; ``soon``: the next put, of it and all before it, does not wait for the interval.

        Raises ``ValueError`` or ``TypeError`` when it is not JSON (NaN is written as such).
        """
        with self._changed:
            if self._format_version is not None and not self._format_told:
                line = {KEY: self._format_version, **line}
            data = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
            if self._abandoned:
                return
            if self._closed:
                raise ValueError(f"{self.uri}: the log is closed")
            self._format_told = True
            if self._local:
                self._pending.append(data)
                self._write_local()
            else:
                self._lines.append(data)
                self._urgent = self._urgent or soon
                self._changed_remotely()

    def flush(self, timeout: float = 60.0) -> None:
        """Returns when every line that there is at the call is in storage, whatever is added meanwhile.

        :class:`StorageError` when one is not within ``timeout`` seconds.
        """
        with self._changed:
            if self._local:
                self._write_local()
                missing = len(self._pending)
            else:
                changes = self._changes
                if changes > self._stored:
                    self._flush_remote(changes, timeout)
                missing = max(0, changes - self._stored)
            if missing:
                cause = self._error.cause if self._error else f"not written within {timeout:g} seconds"
                raise StorageError(self.uri, f"{missing} new lines are not in storage yet: {cause}")

    def close(self, timeout: float = 60.0) -> None:
        """:meth:`flush`, then no more lines are taken. Raises like it; lines left over are lost then."""
        over = time.monotonic() + timeout
        with self._changed:
            try:
                self.flush(timeout)
                while self._dirty():  # more has come meanwhile
                    self.flush(max(0.0, over - time.monotonic()))
            finally:
                self._closed = True
                self._changed.notify_all()

    def abandon(self) -> None:
        """The log is another writer's from now on: nothing is written any more, and what was not yet is dropped."""
        with self._changed:
            self._abandoned = self._closed = True
            self._pending.clear()
            self._stored, self._urgent = self._changes, False
            self._changed.notify_all()

    def cut(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        """Drops the lines after the last one for which ``keep`` is true, also those that are not in storage yet.

        Returns how many. What it costs depends on these lines only, not on how long the log is. In S3 it is brought
        there like new lines are: without waiting for it. Raises :class:`StorageError` when a file cannot be written.
        """
        with self._changed:
            if self._local:
                self._write_local()
            lines, dropped = self._pending if self._local else self._lines, 0
            while lines and not keep(_parse(self._store, self._path, f"line {len(lines)}", lines[-1])):
                lines.pop()
                dropped += 1
            if self._local and not lines:
                dropped += self._cut_file(keep)
            elif dropped and not self._local:
                self._changed_remotely()
            self._format_told = self._format_told and not dropped
            return dropped

    def _cut_file(self, keep: Callable[[dict[str, Any]], bool]) -> int:
        file = self._store.local_path(self._path)
        assert file is not None
        size, dropped = file.stat().st_size if file.exists() else 0, 0
        for offset, line in _backwards(self._store, self._path, size):
            if keep(_parse(self._store, self._path, f"the line at byte {offset}", line)):
                break
            size, dropped = offset, dropped + 1
        if dropped:
            try:
                os.truncate(file, size)
            except OSError as error:
                raise StorageError(self.uri, f"cannot truncate it: {error.strerror}") from error
        return dropped

    def _dirty(self) -> bool:
        return bool(self._pending) or self._changes > self._stored

    def _changed_remotely(self) -> None:
        self._changes += 1
        self._start_thread()

    def _write_local(self) -> None:
        if not self._pending:
            return
        try:
            self._store.append(self._path, b"".join(self._pending))
        except StorageError as error:
            self._error = error
        else:
            self._pending.clear()
            self._error = None

    def _flush_remote(self, changes: int, timeout: float) -> None:
        """Waits for a put that began after now: the failure of one under way says nothing about the present."""
        self._start_thread()
        self._urgent = True
        self._changed.notify_all()
        before = self._puts
        self._changed.wait_for(lambda: self._stored >= changes or self._failed_put > before, timeout)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._put_forever, name=f"log {self._path}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _put_forever(self) -> None:
        not_before = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty() or self._closed)
                # flush() skips the pause
                self._changed.wait_for(lambda: self._urgent or self._closed, max(0.0, not_before - time.monotonic()))
                if self._closed and not self._urgent:
                    return
                self._urgent = False
                self._puts += 1
                changes, lines = self._changes, b"".join(self._lines)
            started = time.monotonic()
            error = self._put(lines)
            took = time.monotonic() - started
            not_before = time.monotonic() + max(self._interval, took / UPLOAD_SHARE)
            with self._changed:
                self._error = error
                if error is not None:
                    self._failed_put = self._puts
                else:
                    self._stored = max(self._stored, changes)
                self._changed.notify_all()

    def _put(self, lines: bytes) -> StorageError | None:
        try:
            self._store.write(self._path, [lines])
        except StorageError as error:
            return error
        return None
