"""Record batches in memory: the last ones that were used, and those that are read ahead in the background."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elastic_train.data.record_batches import Batch

    Key = tuple[int, int]
    """Number of the shard, and of the batch in it."""
    Load = Callable[[Key], Batch]
    _Place = tuple[Load, Key]

MEMORY_BYTES = 64 * 2**20
"""Half a window of the order's inner level, whose samples come from 256 places: batches of 2^18 tokens of 2 bytes."""
THREADS = 4
"""Batches that are read ahead at a time: each waits for storage most of its time."""
IDLE_SECONDS = 1.0
"""How long a thread waits for more to read before it ends."""


@dataclass(slots=True)
class _Entry:
    """A batch that is there, or is to be read by whoever begins first: a thread, or the one who needs it before.

    ``uses``: how often it will still be used, of those who asked for it ahead. ``done``: set when it was read.
    """

    batch: Batch | None = None
    nbytes: int = 0
    uses: int = 0
    pinned: bool = False
    begun: bool = False
    done: threading.Event | None = None


class BatchMemory:
    """About ``limit`` bytes of batches, of any number of data sets. Safe to use from threads.

    What was asked to be read ahead is pinned: it stays until it was used as often as it was asked for. Of the others
    the least recently used go first, but never the last one. When the pinned ones fill the room, no more is read
    ahead until some were used: whoever asks has to use it, or to say that he will not.

    What is read ahead changes nothing that is ever saved: an error of the background is forgotten, and told by
    whoever needs the batch and finds that it still cannot be read.
    """

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit = limit
        self._entries: OrderedDict[_Place, _Entry] = OrderedDict()
        """the least recently used first"""
        self._bytes = self._pinned_bytes = 0
        self._largest = self._being_read = 0
        """bytes of the largest batch so far; how many are being read in the background"""
        self._wanted: deque[_Place] = deque()
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)
        self._idle = 0
        """threads that wait for more"""

    def get(self, load: Load, key: Key) -> Batch:
        """The batch that ``load`` reads, now if it is not there. Raises as ``load``."""
        place = (load, key)
        with self._lock:
            entry = self._entry(place)
            self._entries.move_to_end(place)
            if entry.uses:
                self._use(entry)
                if self._wanted:
                    self._start()
            if entry.batch is not None:
                return entry.batch
        return self._read_once(place)

    def prefetch(self, load: Load, keys: Iterable[Key]) -> None:
        """Have the batches read in the background that are not there; each will be used once more."""
        with self._lock:
            for key in keys:
                entry = self._entry((load, key))
                entry.uses += 1
                if entry.batch is not None:
                    self._pin(entry)
                elif entry.done is None:
                    entry.done = threading.Event()
                    self._wanted.append((load, key))
            self._start()

    def forget(self, load: Load, keys: Iterable[Key]) -> None:
        """Each of what was asked for ahead will be used once less."""
        with self._lock:
            for key in keys:
                entry = self._entry((load, key))
                if entry.uses:
                    self._use(entry)
                if not entry.uses and not entry.begun:
                    entry.done = None
                self._drop((load, key), entry)
            self._start()

    def _entry(self, place: _Place) -> _Entry:
        entry = self._entries.get(place)
        if entry is None:
            entry = self._entries[place] = _Entry()
        return entry

    def _read_once(self, place: _Place) -> Batch:
        """By whoever begins first; what another one could not read the next one tries again."""
        while True:
            with self._lock:
                entry = self._entry(place)
                if entry.batch is not None:
                    return entry.batch
                other = entry.done if entry.begun else None
                entry.begun, entry.done = True, entry.done or threading.Event()
            if other is None:
                return self._read(place, entry)
            other.wait()

    def _read(self, place: _Place, entry: _Entry) -> Batch:
        """By the one who has begun. The entry is not dropped meanwhile."""
        (load, key), batch = place, None
        try:
            batch = load(key)
            return batch
        finally:
            with self._lock:
                done, entry.done, entry.begun = entry.done, None, False
                if batch is not None:
                    self._hold(place, entry, batch)
                self._drop(place, entry)
            if done is not None:
                done.set()

    def _hold(self, place: _Place, entry: _Entry, batch: Batch) -> None:
        entry.batch, entry.nbytes = batch, batch.nbytes
        self._entries.move_to_end(place)
        self._bytes += entry.nbytes
        self._largest = max(self._largest, entry.nbytes)
        if entry.uses:
            self._pin(entry)
        if self._bytes > self._limit:
            self._make_room()

    def _make_room(self) -> None:
        loose = [each for each in self._entries.items() if each[1].batch is not None and not each[1].pinned]
        for place, entry in loose[:-1]:
            entry.batch = None
            self._bytes -= entry.nbytes
            self._drop(place, entry)
            if self._bytes <= self._limit:
                return

    def _drop(self, place: _Place, entry: _Entry) -> None:
        """What is not there, and nobody wants."""
        if entry.batch is None and entry.done is None and not entry.uses:
            self._entries.pop(place, None)

    def _pin(self, entry: _Entry) -> None:
        if not entry.pinned and self._pinned_bytes + entry.nbytes <= self._limit:
            entry.pinned = True
            self._pinned_bytes += entry.nbytes

    def _use(self, entry: _Entry) -> None:
        entry.uses -= 1
        if entry.pinned and not entry.uses:
            entry.pinned = False
            self._pinned_bytes -= entry.nbytes

    def _start(self) -> None:
        """Threads for what is wanted."""
        if self._wanted and self._idle:
            self._more.notify(len(self._wanted))
        while len(self._wanted) > self._idle and self._being_read + self._idle < THREADS and (begun := self._next()):
            threading.Thread(target=self._read_ahead, args=begun, daemon=True).start()

    def _next(self) -> tuple[_Place, _Entry] | None:
        """What is to be read in the background now, if there is room for it."""
        while self._wanted and self._has_room():
            place = self._wanted.popleft()
            entry = self._entries.get(place)
            if entry is not None and entry.done is not None and not entry.begun:  # else another one reads it
                entry.begun = True
                self._being_read += 1
                return place, entry
        return None

    def _read_ahead(self, place: _Place, entry: _Entry) -> None:
        """A thread, which ends when there is nothing to read: none keeps a memory that is not used any more."""
        begun: tuple[_Place, _Entry] | None = (place, entry)
        while begun:
            with contextlib.suppress(Exception):
                self._read(*begun)
            with self._more:
                self._being_read -= 1
                begun = self._next()
                if begun is None:
                    self._idle += 1
                    self._more.wait(IDLE_SECONDS)
                    self._idle -= 1
                    begun = self._next()

    def _has_room(self) -> bool:
        """Always for one: the others wait until it is used, or who needs them reads them."""
        coming = (self._being_read + 1) * self._largest
        return self._pinned_bytes + coming <= self._limit or not (self._pinned_bytes or self._being_read)
