"""Tells each rank of a new generation where its state is, without keeping anybody else waiting.

All ranks say at about the same time what they hold and need. To read one of these descriptions and to answer it takes
milliseconds, for ten thousand ranks together longer than a lease: so they are queued, and the event loop answers
heartbeats between them.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from elastic_train.controller.current_run import CurrentRun
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord

SLICE_SECONDS = 0.005
"""The event loop is kept from everything else for no longer than this and one answer."""


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """What is read meanwhile is kept as long as its generation, and is freed without the garbage collector.

    That would look through all of it again and again, which takes as long as the reading, and seconds at once.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Directions:
    """Of one coordinator. Everything that is told is read before the first answer that could need it.

    Args:
        spawn: runs a coroutine beside everything else.
    """

    def __init__(self, run: CurrentRun, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._run, self._spawn = run, spawn
        self._asked: deque[tuple[HostRecord, Generation, int]] = deque()
        self._working = False

    def described(self, host: HostRecord, generation: Generation, rank: int, text: str) -> None:
        """``rank``, whose host is ``host``, holds what the JSON ``text`` says, and wants to know where to find it."""
        self._run.inventory.describe(generation.number, rank, text)
        if generation.restore is not None and generation.restore.snapshots is not None:
            self._asked.append((host, generation, rank))
        self.look()

    def look(self) -> None:
        """Begin, unless that has been done, with what there is to do."""
        if not self._working and (self._asked or self._run.inventory.unread):
            self._working = True
            self._spawn(self._work())

    async def _work(self) -> None:
        with _no_search_for_cycles():
            whole = await self._work_off()
        self._working = False
        if self._run.generation is not None and whole == self._run.generation.number:
            self._spawn(self._run.checkpointer.plan(whole))

    async def _work_off(self) -> int:
        """Until nothing is left to do; returns the newest generation that is known of all its ranks now."""
        ends, whole = time.perf_counter() + SLICE_SECONDS, 0
        while self._asked or self._run.inventory.unread:
            if self._run.inventory.unread:
                whole = max(whole, self._run.inventory.read_next() or 0)
            else:
                self._answer(*self._asked.popleft())
            if time.perf_counter() >= ends:
                await asyncio.sleep(0)
                ends = time.perf_counter() + SLICE_SECONDS
        return whole

    def _answer(self, host: HostRecord, generation: Generation, rank: int) -> None:
        run, restore = self._run, generation.restore
        if run.generation is not generation or restore is None:
            return
        generation.last_progress = time.time()  # the trainers wait for us
        needs = run.inventory.read(generation.number, rank)
        ranks = restore.directions(rank, host.node, needs, run.members.by_node, run.inventory)
        host.connection.send({"type": "directions", "generation": generation.number, "ranks": ranks})
