"""A store in memory, so that thousands of runs fit into a test; and one that pauses before every call."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import Buffer

from elastic_train.storage.errors import AlreadyExists, NotFound
from elastic_train.storage.store import Entry, Store, Unfinished


class MemoryStore(Store):
    """All that the interface promises; its clock counts the calls that change something."""

    def __init__(self) -> None:
        self.uri = "memory"
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.time = 0.0

    def sub(self, path: str) -> Store:
        raise NotImplementedError

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path not in self.objects:
            raise NotFound(path, "no such object")
        data = self.objects[path][0]
        return data[offset:] if length is None else data[offset : offset + length]

    def size(self, path: str) -> int:
        return len(self.read(path))

    def write(self, path: str, chunks: Iterable[Buffer], size_hint: int | None = None) -> int:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.time += 1
        self.objects[path] = data, self.time
        return len(data)

    def create(self, path: str, data: bytes) -> None:
        if path in self.objects:
            raise AlreadyExists(path, "exists already")
        self.write(path, [data])

    def append(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def list(self, prefix: str = "") -> list[Entry]:
        return [
            Entry(path, len(data), modified)
            for path, (data, modified) in sorted(self.objects.items())
            if path.startswith(prefix)
        ]

    def delete(self, path: str) -> None:
        self.time += 1
        self.objects.pop(path, None)

    def now(self) -> float:
        return self.time

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        return []

    def abandon(self, write: Unfinished) -> None:
        raise NotImplementedError


class Turns:
    """Threads of which exactly one runs at a time, from one storage call to the next; the test says which."""

    def __init__(self) -> None:
        self._go: dict[str, threading.Semaphore] = {}
        self._paused = threading.Semaphore(0)
        self.running: dict[str, threading.Thread] = {}
        self.errors: list[BaseException] = []

    def start(self, name: str, work: object) -> None:
        """A new thread, paused before it does anything. ``work`` is a callable without arguments."""
        assert callable(work)
        self._go[name] = threading.Semaphore(0)

        def run() -> None:
            try:
                self._go[name].acquire()
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                del self.running[name]
                self._paused.release()

        self.running[name] = threading.Thread(target=run, daemon=True)
        self.running[name].start()

    def step(self, name: str) -> None:
        """Let ``name`` go on to its next call, or to its end."""
        self._go[name].release()
        self._paused.acquire()

    def pause(self, name: str) -> None:
        """Called by what works for ``name``: wait for its next turn."""
        self._paused.release()
        self._go[name].acquire()


class PausingStore(MemoryStore):
    """Shares the objects of ``store``; before each call whoever works for ``name`` waits for its turn."""

    def __init__(self, store: MemoryStore, turns: Turns, name: str) -> None:
        super().__init__()
        self._store, self._turns, self._name = store, turns, name
        self._lock = threading.Lock()

    @contextmanager
    def _turn(self) -> Iterator[MemoryStore]:
        with self._lock:  # some work with several threads: one after the other
            self._turns.pause(self._name)
            yield self._store

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._turn() as store:
            return store.read(path, offset, length)

    def write(self, path: str, chunks: Iterable[Buffer], size_hint: int | None = None) -> int:
        with self._turn() as store:
            return store.write(path, chunks)

    def create(self, path: str, data: bytes) -> None:
        with self._turn() as store:
            store.create(path, data)

    def list(self, prefix: str = "") -> list[Entry]:
        with self._turn() as store:
            return store.list(prefix)

    def delete(self, path: str) -> None:
        with self._turn() as store:
            store.delete(path)

    def now(self) -> float:
        return self._store.now()
