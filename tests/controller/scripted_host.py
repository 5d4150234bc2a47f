"""A host without a trainer: tests say what it says, and see what it is told."""

from __future__ import annotations

import asyncio
from typing import Any

from elastic_train.config.layout import Layout
from elastic_train.controller.wire import Connection, Message

TOKEN = "token"
DP2 = Layout(dp_shard=2).as_dict()


class ScriptedHost:
    """Speaks a host's protocol; has no trainer and no images."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def join(self, address: tuple[str, int], number: int | None = None) -> None:
        """``number``: as it was called by the coordinator that has died."""
        self._connection = Connection(*await asyncio.open_connection(*address))
        about = {"node": "ab"[self._rank], "address": "127.0.0.1", "bytes": ["127.0.0.1", 1], "pool": "", "images": []}
        self.tell("join", token=TOKEN, pid=self._rank + 1, host=number, **about)

    async def come_back(self, address: tuple[str, int], **told: Any) -> None:
        """``told``: what its story says of its trainer."""
        await self.join(address, self._rank + 1)
        running = not told.get("last_words")
        part = {"generation": 1, "rank": self._rank, "layout": DP2, "start_step": 0, "running": running}
        known = {"description": None, "last_words": [], "steps": [], "finished_step": 0, "trainer_pid": None}
        self.tell("story", **known | {"part": part} | told)
        self.tell("ready", preload_seconds=0.0)

    def tell(self, kind: str, **fields: Any) -> None:
        self.say({"type": kind, **fields})

    def say(self, message: Message) -> None:
        self._connection.send(message)

    async def hear(self, kind: str) -> Message:
        """The next message of that kind."""
        while (message := await self._connection.receive()) is not None and message["type"] != "stop":
            if message["type"] == kind:
                return message
        raise AssertionError(f"the coordinator said {message} and no {kind!r}")

    async def survey(self) -> None:
        await self.hear("survey")
        self.tell("surveyed")
        await self.hear("tell_pool")
        self.tell("pool", images=[], descriptions=[])

    def leave(self) -> None:
        self._connection.close()
