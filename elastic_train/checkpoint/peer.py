"""The asking side of a byte server's connection: reads ranges of its images, gives it whole images to keep."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from elastic_train.checkpoint.errors import NoRoom, SourceError
from elastic_train.checkpoint.image import Image
from elastic_train.checkpoint.spans import Runs
from elastic_train.checkpoint.wire import receive_frame, receive_into, send_bytes, send_frame

Address = tuple[str, int]
"""(host, port) of a byte server."""
Answer = TypeVar("Answer")

REREADS = 3
"""Bytes that do not have the checksum that came with them are asked for again this often."""


class Peer:
    """One connection, kept for many requests and opened anew when it was lost. Requests of several threads queue up."""

    def __init__(self, address: Address, token: str, timeout: float = 10.0) -> None:
        """``timeout`` (seconds) holds for each wait on the network, not for a request. Connects when first asked."""
        self.address = address
        self._token = token
        self._timeout = timeout
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._lost: tuple[float, str] | None = None

    def read(self, image: str, step: int, runs: Sequence[Runs]) -> npt.NDArray[np.uint8]:
        """The bytes of ``runs``, one after another, of the peer's image of that name, which must hold ``step``.

        ``runs`` ascend and do not overlap. Bytes that were spoilt on the way are asked for again, ``REREADS`` times.
        Raises SourceError with the peer's reason, the network's, or a checksum that does not fit.
        """
        data = np.empty(sum(run.nbytes for run in runs), dtype=np.uint8)
        ranges = [[run.begin, run.length, run.stride, run.count] for run in runs]
        request = {"op": "read", "image": image, "step": step, "ranges": ranges}
        for again in reversed(range(1 + REREADS)):
            announced, actual = self._run(lambda sock: self._receive(sock, request, data))
            if actual == announced:
                break
            if not again:
                raise SourceError(f"{self} sent bytes of {image} with xxh3 {actual}; it announced {announced}")
        return data

    def _receive(self, sock: socket.socket, request: dict[str, Any], data: npt.NDArray[np.uint8]) -> tuple[str, str]:
        """Fills ``data`` with the answer; returns the xxh3 that was announced, and that of what came."""
        header = self._ask(sock, request)
        if header.get("nbytes") != data.nbytes:
            raise SourceError(f"{self} answered with {header.get('nbytes')!r} bytes; {data.nbytes} were asked for")
        receive_into(sock, data.data)
        return str(header.get("xxh3")), xxhash.xxh3_64_hexdigest(data.data)

    def put(self, path: str | Path, step: int) -> int:
        """Gives the peer the image at ``path``, which must hold ``step``; returns its bytes once the peer has it whole.

        Raises ImageError when the image is not of that step (or was overwritten meanwhile), NoRoom when the peer has no
        memory left for it, SourceError when the peer refuses it (wrong token, an older generation) or is lost.
        """
        image = Image.open(path)
        nbytes = image.nbytes
        image.require(step)
        digest = xxhash.xxh3_64_hexdigest(image.data.data)
        description = image.description_text().decode()
        request = {"op": "put", "image": image.path.name, "step": step, "nbytes": nbytes, "xxh3": digest}

        def attempt(sock: socket.socket) -> None:
            self._ask(sock, request | {"description": description})
            # Only now, when the peer has agreed: else its refusal could be lost in the flood of bytes.
            send_bytes(sock, image.data.data)
            self._answer(sock)

        self._run(attempt)
        image.require(step)
        return nbytes

    def close(self) -> None:
        """Ends the connection; a later request opens a new one."""
        with self._lock:
            self._drop()

    def __str__(self) -> str:
        return f"host {self.address[0]}:{self.address[1]}"

    def _run(self, attempt: Callable[[socket.socket], Answer]) -> Answer:
        """Runs ``attempt`` on the kept connection and, when that turns out to be stale, once more on a new one."""
        asked = time.monotonic()
        with self._lock:
            if self._lost is not None and self._lost[0] > asked:
                raise SourceError(self._lost[1])  # waiting for it again, once per queued request, would add up
            kept = self._sock is not None
            try:
                try:
                    return attempt(self._connected())
                except ConnectionError:
                    if not kept:
                        raise
                    self._drop()
                    return attempt(self._connected())
            except OSError as error:
                self._drop()
                self._lost = time.monotonic(), f"{self} does not answer: {error}"
                raise SourceError(self._lost[1]) from error
            except SourceError:
                self._drop()  # what is still on the way would be taken for the answer to the next request
                raise

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.create_connection(self.address, timeout=self._timeout)
            self._sock = sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ask(sock, {"op": "hello", "token": self._token})
        return self._sock

    def _drop(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.close()
            self._sock = None

    def _ask(self, sock: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        send_frame(sock, request)
        return self._answer(sock)

    def _answer(self, sock: socket.socket) -> dict[str, Any]:
        answer = receive_frame(sock)
        if answer is None:
            raise ConnectionError("the connection was closed")
        if answer.get("ok") is not True:
            refusal = NoRoom if answer.get("no_room") is True else SourceError
            raise refusal(f"{self} refused: {answer.get('error', 'no reason given')}")
        return answer
