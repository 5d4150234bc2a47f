"""Nodes that Ray is told will be taken away, by a cloud's node provider, a person or our own chaos: found by asking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5

Drain = Callable[[str, float | None, str], None]
"""Told the node, the seconds until its end (None: not known), and the reason."""


class DrainWatch:
    """Asks again and again.

    Args:
        ask: the draining nodes and the seconds that each has left; may block, runs in a thread.
        drain: called on the event loop for each node once.
    """

    def __init__(self, ask: Callable[[], Mapping[str, float | None]], drain: Drain) -> None:
        self._ask, self._drain = ask, drain
        self._known: set[str] = set()
        self._complained = False

    async def watch(self, pause: float = _POLL_SECONDS) -> None:
        """For ever. A cluster that does not answer is asked again; that is logged once."""
        while True:
            try:
                found = await asyncio.to_thread(self._ask)
            except Exception as error:  # Ray has no type for it
                found = {}
                if not self._complained:
                    logger.warning("Ray does not say which nodes are drained: %s", error)
                self._complained = True
            else:
                self._complained = False
                self._tell(found)
            await asyncio.sleep(pause)

    def _tell(self, found: Mapping[str, float | None]) -> None:
        for node, seconds in found.items():
            if node not in self._known:
                self._drain(node, seconds, "drained by Ray")
        self._known = set(found)
