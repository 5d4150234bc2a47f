"""A page of memory that a host and its trainer share: how far each of them is. No locks: every field has one writer."""

from __future__ import annotations

import mmap
import os

_FIELDS = ("finished_step", "next_buffer", "started_step", "beats", "held_step")
_SIZE = 4096
_LINE = 8
"""Integers per cache line: each field has one of its own."""


class ControlBlock:
    """Integers in shared memory.

    Written by the host:
        ``next_buffer``: the image buffer that the trainer's next snapshot goes to.
        ``finished_step``: the newest step that is whole on all ranks and partners. Set after ``next_buffer``, so that a
        trainer that sees the step also sees the buffer.
        ``held_step``: the same of this rank's own image only, told while there is no coordinator to tell of all.
    Written by the trainer:
        ``started_step``: the step it is in. ``beats``: blocks begun, forward and backward (a standing count is a hang).
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(descriptor, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
            # Assignments are single stores. ``struct.pack_into`` would be seen from outside: it writes zeros first.
            self._values = memoryview(self._memory).cast("q")
        finally:
            os.close(descriptor)
        self.path = path

    def _get(self, field: str) -> int:
        return self._values[_LINE * _FIELDS.index(field)]

    def _set(self, field: str, value: int) -> None:
        self._values[_LINE * _FIELDS.index(field)] = value

    @property
    def finished_step(self) -> int:
        return self._get("finished_step")

    @property
    def held_step(self) -> int:
        return self._get("held_step")

    @property
    def next_buffer(self) -> int:
        return self._get("next_buffer")

    @property
    def started_step(self) -> int:
        return self._get("started_step")

    @property
    def beats(self) -> int:
        return self._get("beats")

    def allow(self, finished_step: int, next_buffer: int) -> None:
        """Host: the trainer may now write the snapshot after ``finished_step`` into ``next_buffer``."""
        self._set("next_buffer", next_buffer)
        self._set("finished_step", finished_step)

    def lend(self, held_step: int, next_buffer: int) -> None:
        """Host without a coordinator: as ``allow``, once the other ranks' hosts have come as far."""
        self._set("next_buffer", next_buffer)
        self._set("held_step", held_step)

    def start(self, step: int) -> None:
        """Trainer: step ``step`` begins."""
        self._set("started_step", step)

    def beat(self) -> None:
        """Trainer: one more block begun."""
        self._set("beats", self._get("beats") + 1)

    def close(self, *, unlink: bool = False) -> None:
        self._values.release()
        self._memory.close()
        if unlink and os.path.exists(self.path):
            os.unlink(self.path)
