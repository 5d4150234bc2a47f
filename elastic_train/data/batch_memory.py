"""Record batches in memory: the last ones that were used, and those that are read ahead in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.data.record_batches import Batch

Key = tuple[int, int]
"""Number of the shard, and of the batch in it."""
MEMORY_BYTES = 64 * 2**20
"""About a window of the order's inner level, whose samples come from 256 places."""
THREADS = 4
"""Batches that are read ahead at a time: each waits for storage most of its time."""


class _Coming:
    """A batch that is to be read, by whoever claims it first: a thread, or the one who needs it before."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._unclaimed = threading.Lock()

    def claim(self) -> bool:
        """Whether it is the caller's to read."""
        return self._unclaimed.acquire(blocking=False)


class BatchMemory:
    """At most ``limit`` bytes of batches (and always one); the least recently used go first. Safe to use from threads.

    What is read ahead changes nothing that is ever saved: an error of the background is forgotten, and told by
    whoever needs the batch and finds that it still cannot be read.
    """

    def __init__(self, load: Callable[[Key], Batch], limit: int = MEMORY_BYTES) -> None:
        self._load, self._limit = load, limit
        self._held: OrderedDict[Key, Batch] = OrderedDict()
        self._bytes = 0
        self._coming: dict[Key, _Coming] = {}
        self._wanted: queue.SimpleQueue[tuple[Key, _Coming]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def get(self, key: Key) -> Batch:
        """The batch, read now if it is not there. Raises as ``load``."""
        batch, coming = self._look(key)
        if batch is None and coming is not None and not coming.claim():
            coming.done.wait()
            batch, _ = self._look(key)
        if batch is None:
            try:
                batch = self._load(key)
                self._hold(key, batch)
            finally:
                self._came(key, coming)
        return batch

    def prefetch(self, key: Key) -> None:
        """Have the batch read in the background, unless it is there, or on its way."""
        with self._lock:
            if key in self._held or key in self._coming:
                return
            coming = self._coming[key] = _Coming()
        self._wanted.put((key, coming))
        if not self._threads:
            self._threads = [threading.Thread(target=self._read_ahead, daemon=True) for _ in range(THREADS)]
            for thread in self._threads:
                thread.start()

    def _look(self, key: Key) -> tuple[Batch | None, _Coming | None]:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key), self._coming.get(key)

    def _hold(self, key: Key, batch: Batch) -> None:
        with self._lock:
            if key not in self._held:
                self._held[key] = batch
                self._bytes += batch.nbytes
            while self._bytes > self._limit and len(self._held) > 1:
                self._bytes -= self._held.popitem(last=False)[1].nbytes

    def _came(self, key: Key, coming: _Coming | None) -> None:
        if coming is not None:
            with self._lock:
                self._coming.pop(key, None)
            coming.done.set()

    def _read_ahead(self) -> None:
        while True:
            key, coming = self._wanted.get()
            if coming.claim():
                with contextlib.suppress(Exception):
                    self._hold(key, self._load(key))
                self._came(key, coming)
