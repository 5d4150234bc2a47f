"""The host's way to the coordinator, and back to it when it has died: it comes back, perhaps at another address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from elastic_train.controller.wire import LINE_LIMIT, Connection

logger = logging.getLogger(__name__)

Address = tuple[str, int]
_PAUSE_SECONDS = 0.1
_CONNECT_SECONDS = 5.0


class CoordinatorLink:
    """Makes connections to one job's coordinator.

    Args:
        address: where it is at first.
        find: where it is now, asked in a thread once it is gone; None: not known, or not there.
        patience_seconds: how long a coordinator that is gone is waited for.
    """

    def __init__(self, address: Address, find: Callable[[], Address | None], patience_seconds: float) -> None:
        self._address, self._find, self._patience = address, find, patience_seconds

    async def connect(self) -> Connection:
        """Raises OSError when nobody listens there, nor anywhere else in time."""
        loop = asyncio.get_running_loop()
        address = await loop.run_in_executor(None, self._find)  # what was there at first may be another's by now
        try:
            return await self._connect(address or self._address)
        except OSError:
            if (connection := await self.connect_again(loop.time())) is None:
                raise
            return connection

    async def connect_again(self, since: float) -> Connection | None:
        """A connection to the coordinator, gone ``since`` (seconds of the loop's clock); None when not back in time."""
        if self._patience <= 0:
            return None
        try:
            async with asyncio.timeout_at(since + self._patience):
                await asyncio.sleep(_PAUSE_SECONDS)  # also between connections that it takes and ends at once
                return await self._keep_trying()
        except TimeoutError:
            return None

    async def _keep_trying(self) -> Connection:
        loop = asyncio.get_running_loop()
        while True:
            address = await loop.run_in_executor(None, self._find)
            if address is not None:
                try:
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        return await self._connect(address)
                except (OSError, TimeoutError) as error:
                    logger.debug("no coordinator at %s: %s", address, error)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _connect(self, address: Address) -> Connection:
        reader, writer = await asyncio.open_connection(*address, limit=LINE_LIMIT)
        return Connection(reader, writer)
