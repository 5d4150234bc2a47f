"""Messages of the control plane: one JSON object per line over TCP or a socket pair. Nothing is ever unpickled."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any

Message = dict[str, Any]

LINE_LIMIT = 1 << 28
"""Longest accepted line in bytes (descriptions of a big model's shards are the longest messages)."""


class WireError(Exception):
    """The peer sent something that is not a message of this protocol."""


def encode(message: Message) -> bytes:
    """The bytes of one message, its newline included."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line.

    Raises:
        WireError: the line is not a JSON object with a ``type``.
    """
    try:
        message = json.loads(line)
    except ValueError as error:
        raise WireError(f"a line of {len(line)} bytes is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError(f"a message must be a JSON object with a 'type', got {line[:80]!r}")
    return message


class Connection:
    """One end of a message stream. ``send`` never blocks; a slow peer is bounded by ``max_backlog`` bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_backlog: int = 1 << 30) -> None:
        self._reader = reader
        self._writer = writer
        self._max_backlog = max_backlog
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
        """The next message, or None when the peer is gone."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, OSError):
            return None
        if not line.endswith(b"\n"):
            return None
        self.last_heard = asyncio.get_running_loop().time()
        return decode(line)

    async def drain(self) -> None:
        """Wait until the queued bytes are handed to the kernel or the peer is gone."""
        try:
            await self._writer.drain()
        except (ConnectionError, OSError):
            self.close()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once, queued bytes are dropped."""
        self._writer.transport.abort()


def token_matches(message: Message, token: str) -> bool:
    """Whether the message carries the job's secret (compared in constant time)."""
    given = message.get("token")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())
