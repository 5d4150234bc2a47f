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
    Load = Callable[[Key], Batch]
    _Place = tuple[Load, Key]

MEMORY_BYTES = 64 * 2**20
"""Half a window of the order's inner level, whose samples come from 256 places: batches of 2^18 tokens of 2 bytes."""
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
    """About ``limit`` bytes of batches, of any number of data sets. Safe to use from threads.

    What was asked to be read ahead is pinned: it stays until it was used as often as it was asked for. Of the others
    the least recently used go first, but never the last one. When the pinned ones fill the room, no more is read
    ahead until some were used: whoever asks has to use it.

    What is read ahead changes nothing that is ever saved: an error of the background is forgotten, and told by
    whoever needs the batch and finds that it still cannot be read.
    """

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit = limit
        self._used: OrderedDict[_Place, Batch] = OrderedDict()
        self._pinned: dict[_Place, Batch] = {}
        self._uses: dict[_Place, int] = {}
        """how often what was read ahead will still be used"""
        self._used_bytes = self._pinned_bytes = 0
        self._largest = self._being_read = 0
        """bytes of the largest batch so far; how many are being read in the background"""
        self._coming: dict[_Place, _Coming] = {}
        self._wanted: queue.SimpleQueue[tuple[_Place, _Coming]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    def get(self, load: Load, key: Key) -> Batch:
        """The batch that ``load`` reads, now if it is not there. Raises as ``load``."""
        place = (load, key)
        with self._lock:
            batch, coming = self._take(place), self._coming.get(place)
        if batch is None and coming is not None and not coming.claim():
            coming.done.wait()
            with self._lock:
                batch = self._held(place)
        if batch is None:
            try:
                batch = load(key)
                self._hold(place, batch)
            finally:
                self._came(place, coming)
        return batch

    def prefetch(self, load: Load, key: Key) -> None:
        """Have the batch read in the background, unless it is there, or on its way; it will be used once more."""
        place = (load, key)
        with self._lock:
            self._uses[place] = self._uses.get(place, 0) + 1
            if place in self._used:
                batch = self._used.pop(place)
                self._used_bytes -= batch.nbytes
                self._put(place, batch)
            if self._held(place) is not None or place in self._coming:
                return
            coming = self._coming[place] = _Coming()
        self._wanted.put((place, coming))
        if not self._threads:
            self._threads = [threading.Thread(target=self._read_ahead, daemon=True) for _ in range(THREADS)]
            for thread in self._threads:
                thread.start()

    def _held(self, place: _Place) -> Batch | None:
        return self._pinned.get(place) or self._used.get(place)

    def _take(self, place: _Place) -> Batch | None:
        """The batch, if it is there, which is used once by that."""
        batch = self._held(place)
        uses = self._uses.get(place, 0)
        if uses > 1:
            self._uses[place] = uses - 1
        elif uses:
            del self._uses[place]
            if place in self._pinned:
                released = self._pinned.pop(place)
                self._pinned_bytes -= released.nbytes
                self._put(place, released)
                self._room.notify_all()
        if place in self._used:
            self._used.move_to_end(place)
        return batch

    def _put(self, place: _Place, batch: Batch) -> None:
        if place in self._uses and self._pinned_bytes + batch.nbytes <= self._limit:
            self._pinned[place] = batch
            self._pinned_bytes += batch.nbytes
        else:
            self._used[place] = batch
            self._used_bytes += batch.nbytes

    def _hold(self, place: _Place, batch: Batch) -> None:
        with self._lock:
            self._largest = max(self._largest, batch.nbytes)
            if self._held(place) is None:
                self._put(place, batch)
            while self._used_bytes + self._pinned_bytes > self._limit and len(self._used) > 1:
                self._used_bytes -= self._used.popitem(last=False)[1].nbytes

    def _came(self, place: _Place, coming: _Coming | None) -> None:
        if coming is not None:
            with self._lock:
                self._coming.pop(place, None)
            coming.done.set()

    def _read_ahead(self) -> None:
        while True:
            place, coming = self._wanted.get()
            with self._room:
                self._room.wait_for(self._has_room)
                self._being_read += 1
            if coming.claim():
                with contextlib.suppress(Exception):
                    load, key = place
                    self._hold(place, load(key))
                self._came(place, coming)
            with self._room:
                self._being_read -= 1
                self._room.notify_all()

    def _has_room(self) -> bool:
        """Always for one: the others wait until it is used, or read what they need themselves."""
        coming = (self._being_read + 1) * self._largest
        return self._pinned_bytes + coming <= self._limit or not (self._pinned or self._being_read)
