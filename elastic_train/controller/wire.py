"""Messages of the control plane: one JSON object per line over TCP or a socket pair. Nothing is ever unpickled."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any

Message = dict[str, Any]

LINE_LIMIT = 1 << 28
"""Longest accepted line in bytes (descriptions of a big model's shards are the longest messages)."""
HELLO_LIMIT = 1 << 18
"""Longest accepted line of a peer that has not shown the token yet."""
_READ_BYTES = 1 << 16
_ENCODER = json.JSONEncoder(separators=(",", ":"))
"""one for all messages: ``json.dumps`` makes one for each, which costs as much as a heartbeat's reply"""


class WireError(Exception):
    """The peer sent something that is not a message of this protocol."""


def encode(message: Message) -> bytes:
    """The bytes of one message, its newline included."""
    return f"{_ENCODER.encode(message)}\n".encode()


def decode(line: bytes) -> Message:
    """The message in one line.

    Raises:
        WireError: the line is not a JSON object with a ``type``.
    """
    try:
        message = json.loads(line.decode())  # bytes are looked at for other encodings first
    except (ValueError, RecursionError) as error:
        raise WireError(f"a line of {len(line)} bytes is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError(f"a message must be a JSON object with a 'type', got {line[:80]!r}")
    return message


class Connection:
    """One end of a message stream. ``send`` never blocks; a slow peer is bounded by ``max_backlog`` bytes.

    A line may have ``limit`` bytes, its newline included. The reader's own limit is of no matter, but bounds what is
    buffered beyond that.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        limit: int = LINE_LIMIT,
        max_backlog: int = 1 << 30,
    ) -> None:
        self.limit = limit
        self._reader = reader
        self._writer = writer
        self._max_backlog = max_backlog
        self._received = bytearray()
        self.last_heard = asyncio.get_running_loop().time()

    def send(self, message: Message) -> None:
        """Queue a message; a closed or hopelessly slow peer loses it and its connection."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > self._max_backlog:
            self.close()
            return
        self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """The next message, or None when the peer is gone.

        Raises:
            WireError: what came is not a message, or longer than ``limit``.
        """
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0 and len(self._received) < self.limit:
            searched = len(self._received)
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        if not 0 <= end < self.limit:
            raise WireError(f"a line is longer than {self.limit} bytes")
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        self.last_heard = asyncio.get_running_loop().time()
        return decode(line)

    async def drain(self) -> None:
        """Wait until the queued bytes are handed to the kernel or the peer is gone."""
        try:
            await self._writer.drain()
        except (ConnectionError, OSError):
            self.close()

    @property
    def closed(self) -> bool:
        """Whether this end has closed it."""
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once, queued bytes are dropped."""
        self._writer.transport.abort()


def token_matches(message: Message, token: str) -> bool:
    """Whether the message carries the job's secret (compared in constant time)."""
    given = message.get("token")
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="surrogatepass"), token.encode())
