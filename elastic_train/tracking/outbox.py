"""The bounded buffer between the thread that reads the coordinator's messages and the one that talks to MLflow."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

Message = dict[str, Any]


class Outbox:
    """First in, first out. When full, the oldest waiting step gives way; other messages are few and are kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Message] = deque()
        self._in_flight = 0
        self._ready = threading.Condition()
        self.dropped_steps = 0
        """Steps that gave way so far."""

    def put(self, message: Message) -> None:
        """Never blocks longer than the lock."""
        with self._ready:
            if len(self._items) >= self._capacity:
                self._make_room()
            self._items.append(message)
            self._ready.notify()

    def _make_room(self) -> None:
        for index in range(self._in_flight, len(self._items)):
            if self._items[index]["type"] == "step":
                del self._items[index]
                self.dropped_steps += 1
                return

    def take(self, limit: int) -> list[Message]:
        """Up to ``limit`` messages from the front, waiting for the first. They stay inside until ``done`` is called."""
        with self._ready:
            while not self._items:
                self._ready.wait()
            self._in_flight = min(limit, len(self._items))
            return [self._items[index] for index in range(self._in_flight)]

    def done(self, count: int) -> None:
        """The first ``count`` messages of the last ``take`` that were not done yet are dealt with."""
        with self._ready:
            for _ in range(count):
                self._items.popleft()
            self._in_flight -= count

    def waiting_steps(self) -> int:
        """Steps that have not been dealt with."""
        with self._ready:
            return sum(message["type"] == "step" for message in self._items)
