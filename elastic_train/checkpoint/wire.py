"""Frames on a byte server's connection: 4-byte big-endian length, then JSON; raw bytes follow where the JSON says so.

Nothing is allocated for a length that has not been checked against a limit, and nothing received is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from elastic_train.checkpoint.errors import SourceError

HELLO_LIMIT = 4096
"""Bytes of the first frame, which arrives before the peer has shown its token."""
FRAME_LIMIT = 64 * 2**20
"""Bytes of any later frame; the description of a rank of a 400 B-parameter job has about 1 MB."""
PIECE_BYTES = 2**20
"""Python's ``sendall`` takes a time-out as the limit of the whole call, so large data are sent in pieces."""
_LENGTH = struct.Struct(">I")


def send_frame(sock: socket.socket, message: dict[str, Any]) -> None:
    """Sends one JSON object."""
    text = json.dumps(message, separators=(",", ":")).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)


def receive_frame(sock: socket.socket, limit: int = FRAME_LIMIT) -> dict[str, Any] | None:
    """One JSON object, or None when the peer has closed between frames.

    Raises SourceError for a frame over ``limit`` bytes and one that is no JSON object, ConnectionError for one cut off.
    """
    head = sock.recv(_LENGTH.size)
    if not head:
        return None
    if len(head) < _LENGTH.size:
        rest = bytearray(_LENGTH.size - len(head))
        receive_into(sock, memoryview(rest))
        head += rest
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise SourceError(f"a frame of {length} bytes was announced; the limit is {limit}")
    text = bytearray(length)
    receive_into(sock, memoryview(text))
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"a frame is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise SourceError("a frame is not a JSON object")
    return message


def send_bytes(sock: socket.socket, data: memoryview) -> None:
    """Sends all of ``data``. A time-out of the socket holds for each piece of it, not for the whole."""
    for begin in range(0, len(data), PIECE_BYTES):
        sock.sendall(data[begin : begin + PIECE_BYTES])


def receive_into(sock: socket.socket, target: memoryview) -> None:
    """Fills ``target``; raises ConnectionError when the peer closes before it is full."""
    done = 0
    while done < len(target):
        count = sock.recv_into(target[done:])
        if count == 0:
            raise ConnectionError(f"the connection was closed after {done} of {len(target)} bytes")
        done += count


def integer(message: dict[str, Any], field: str, limit: int) -> int:
    """The value of ``field``; raises SourceError unless it is an integer from 0 to ``limit``."""
    value = message.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise SourceError(f"{field}={value!r} must be an integer from 0 to {limit}")
    return value


def text(message: dict[str, Any], field: str) -> str:
    """The value of ``field``; raises SourceError unless it is a string."""
    value = message.get(field)
    if not isinstance(value, str):
        raise SourceError(f"{field}={value!r} must be a string")
    return value
