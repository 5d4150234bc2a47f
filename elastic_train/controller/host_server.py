"""Where hosts connect: a connection counts as a host's once it has shown the job's token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.wire import HELLO_LIMIT, LINE_LIMIT, Connection, Message, WireError, token_matches

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
"""A connection that has not shown the token by then is closed."""


class HostServer:
    """Listens for the hosts of one job.

    Args:
        token: secret that hosts show.
        join: called with a connection and its first message; returns the host.
        handle: called with each further message of a host.
        lose: called when the connection of a host has ended.
    """

    def __init__(
        self,
        token: str,
        join: Callable[[Connection, Message], HostRecord],
        handle: Callable[[HostRecord, Message], None],
        lose: Callable[[HostRecord], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._token, self._join, self._handle, self._lose, self._fail = token, join, handle, lose, fail
        self._server: asyncio.Server | None = None

    async def start(self, address: str, port: int = 0) -> tuple[str, int]:
        """Listen on ``address``; returns it with the port."""
        self._server = await asyncio.start_server(self._serve, address, port)
        found: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return found

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer, limit=HELLO_LIMIT)
        host: HostRecord | None = None
        try:
            first = await asyncio.wait_for(connection.receive(), _HELLO_SECONDS)
            if first is None or first["type"] != "join" or not token_matches(first, self._token):
                return
            connection.limit = LINE_LIMIT
            host = self._join(connection, first)
            while (message := await connection.receive()) is not None:
                self._handle(host, message)
        except (WireError, TimeoutError) as error:
            logger.warning("dropping a connection: %s", str(error) or "it did not say who it is")
        except Exception as error:
            self._fail(error)
        finally:
            connection.close()
            if host is not None:
                self._leave(host)

    def _leave(self, host: HostRecord) -> None:
        try:
            self._lose(host)
        except Exception as error:
            self._fail(error)
