"""Ports on loopback that nobody listens on."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

from elastic_train.cli.guard import UserError

_LOWEST, _HIGHEST = 20000, 22768
"""Above what Ray gives to its workers (up to 19999), and with 10000 added still below what the kernel gives to outgoing
connections (from 32768)."""


class PortPicker:
    """Never picks a port twice."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def pick(self, option: str, wanted: Sequence[int], count: int, pairs: bool = False) -> tuple[int, ...]:
        """``wanted`` first, then free ones up to ``count``; ``pairs``: each port + 10000 is opened, too.

        Raises UserError when a wanted one is not free; ``option`` is where the user could name another.
        """
        for port in wanted:
            if not self._is_free(port, pairs):
                also = f" (or {port + 10000}, which the server opens, too)" if pairs else ""
                raise UserError(f"port {port}{also} is taken by another program; give a free one as {option}")
            self._taken.add(port)
        found = list(wanted)
        while len(found) < count:
            port = _LOWEST + secrets.randbelow(_HIGHEST - _LOWEST)
            if self._is_free(port, pairs):
                self._taken.add(port)
                found.append(port)
        return tuple(found)

    def _is_free(self, port: int, pairs: bool) -> bool:
        return all(
            number not in self._taken and _free(number) for number in ([port, port + 10000] if pairs else [port])
        )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True
