"""A host's server of snapshot bytes: gives ranges of the images in its directory, keeps images that partners send.

A connection begins with a hello that carries the job's token; then come requests, each answered before the next:
``read`` of ranges [begin, length, stride, count] -> {ok, nbytes, xxh3} + their bytes, one after another; ``put`` ->
{ok} (go on), the bytes, {ok} (whole and verified). A refusal is {ok: false, error: sentence}.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import xxhash

from elastic_train.checkpoint.description import Description
from elastic_train.checkpoint.errors import CheckpointError, ImageError, NoRoom, SourceError
from elastic_train.checkpoint.gather import gathered, ranges
from elastic_train.checkpoint.image import Image, parse_image_name, remove_older
from elastic_train.checkpoint.wire import (
    HELLO_LIMIT,
    integer,
    receive_frame,
    receive_into,
    send_bytes,
    send_frame,
    text,
)

logger = logging.getLogger(__name__)

_MAX_STEP = 2**62


class ByteServer:
    """Serves one host's directory of images, one thread per connection.

    The hosts of a node share the directory. Images are named by generation and rank, and copies go to other nodes, so
    that no copy can overwrite its original.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        directory: str | Path,
        *,
        timeout: float = 30.0,
        max_image_bytes: int = 2**40,
    ) -> None:
        """``port`` 0 takes a free one; ``timeout`` (seconds) ends a peer that stops in the middle of a request."""
        if not token:
            raise ValueError("the token of a byte server must not be empty")
        self._bind = (host, port)
        self._token = token.encode()
        self._directory = Path(directory)
        self._timeout = timeout
        self._max_image_bytes = max_image_bytes
        self._lowest_generation = 0
        self._keep: Collection[str] = ()
        self._lock = threading.Lock()
        self._receiving: set[str] = set()
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None

    def start(self) -> ByteServer:
        """Binds and serves in the background. Raises OSError when the address is taken."""
        self._listener = socket.create_server(self._bind, backlog=128)
        self._spawn(self._accept, self._listener)
        return self

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) that is bound; only after ``start``."""
        if self._listener is None:
            raise RuntimeError("the byte server is not started")
        host, port = self._listener.getsockname()[:2]
        return host, port

    def fence(self, generation: int, keep: Collection[str] = ()) -> None:
        """From now on refuses images of generations before ``generation``: their senders are cut off or too late.

        What there is of them makes room when there is none left, except for the images named in ``keep``.
        """
        if generation >= self._lowest_generation:
            self._lowest_generation, self._keep = generation, frozenset(keep)

    def close(self) -> None:
        """Ends all connections and waits for their threads."""
        listener = self._listener
        if listener is None:
            return
        self._listener = None
        with self._lock:
            ending = [listener, *self._connections]
            threads = list(self._threads)
        for sock in ending:
            with contextlib.suppress(OSError):  # one that its peer has already ended
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        listener.close()

    def _spawn(self, target: Any, sock: socket.socket) -> None:
        def run() -> None:
            try:
                target(sock)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="byte-server", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is not None:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._listener is not None:
                    logger.exception("the byte server at %s stopped accepting connections", self._bind)
                return
            _keep_alive(sock)
            self._spawn(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            with self._lock:
                self._connections.add(sock)
            try:
                if self._listener is not None and self._admit(sock):
                    self._answer_all(sock)
            except (OSError, SourceError) as error:
                logger.info("a connection of the byte server ended: %s", error)
            finally:
                with self._lock:
                    self._connections.discard(sock)

    def _admit(self, sock: socket.socket) -> bool:
        sock.settimeout(self._timeout)
        hello = receive_frame(sock, HELLO_LIMIT)
        if hello is None:
            return False
        token = hello.get("token")
        admitted = isinstance(token, str) and hmac.compare_digest(token.encode(errors="surrogatepass"), self._token)
        send_frame(sock, {"ok": True} if admitted else {"ok": False, "error": "wrong token"})
        return admitted

    def _answer_all(self, sock: socket.socket) -> None:
        while True:
            sock.settimeout(None)  # idle between requests is normal; keepalive finds peers that are gone
            request = receive_frame(sock)
            if request is None:
                return
            sock.settimeout(self._timeout)
            try:
                self._answer(sock, request)
            except CheckpointError as error:
                send_frame(sock, {"ok": False, "error": str(error), "no_room": isinstance(error, NoRoom)})

    def _answer(self, sock: socket.socket, request: dict[str, Any]) -> None:
        operation = request.get("op")
        if operation == "read":
            self._read(sock, request)
        elif operation == "put":
            self._put(sock, request)
        else:
            raise SourceError(f"op={operation!r} must be 'read' or 'put'")

    def _read(self, sock: socket.socket, request: dict[str, Any]) -> None:
        name = text(request, "image")
        parse_image_name(name)
        step = integer(request, "step", _MAX_STEP)
        image = Image.open(self._directory / name)
        image.require(step)
        data = gathered(image.data, ranges(request, image.nbytes))
        digest = xxhash.xxh3_64_hexdigest(data.data)
        # The checksum is of this step for sure; bytes that change while they are sent will not fit it.
        image.require(step)
        send_frame(sock, {"ok": True, "nbytes": data.nbytes, "xxh3": digest})
        send_bytes(sock, data.data)

    def _put(self, sock: socket.socket, request: dict[str, Any]) -> None:
        name = text(request, "image")
        with self._lock:
            if name in self._receiving:
                raise SourceError(f"image {name} is being received on another connection")
            self._receiving.add(name)
        try:
            self._receive_image(sock, name, request)
        finally:
            with self._lock:
                self._receiving.discard(name)

    def _receive_image(self, sock: socket.socket, name: str, request: dict[str, Any]) -> None:
        generation, rank, _ = parse_image_name(name)
        if generation < self._lowest_generation:
            lowest = self._lowest_generation
            raise SourceError(f"image {name} is of generation {generation}; accepted are {lowest} and later")
        step = integer(request, "step", _MAX_STEP)
        nbytes = integer(request, "nbytes", self._max_image_bytes)
        expected = text(request, "xxh3")
        image = self._image_for(name, generation, rank, text(request, "description").encode())
        if image.nbytes != nbytes:
            raise SourceError(f"nbytes={nbytes} of image {name} must be the {image.nbytes} of its description")
        if image.whole and image.step > step:
            raise SourceError(f"image {name} already holds step {image.step}; step {step} came too late")
        image.begin(step)
        send_frame(sock, {"ok": True})
        receive_into(sock, image.data.data)
        actual = xxhash.xxh3_64_hexdigest(image.data.data)
        if actual != expected:
            raise SourceError(f"image {name} of step {step} arrived with xxh3 {actual}; {expected} was announced")
        image.finish(step)
        send_frame(sock, {"ok": True})

    def _image_for(self, name: str, generation: int, rank: int, description: bytes) -> Image:
        """The image that is already there for this description (its pages are warm), else a new one."""
        path = self._directory / name
        try:
            image = Image.open(path, write=True)
            if image.description_text() == description:
                return image
        except ImageError:
            pass  # the first snapshot of a generation, or what a crash has left: made anew below
        wanted = Description.from_json(description)
        if wanted.nbytes > self._max_image_bytes:
            raise SourceError(f"image {name} has {wanted.nbytes} bytes; the limit is {self._max_image_bytes}")
        try:
            return Image.create(path, generation, rank, wanted)
        except NoRoom:
            remove_older(self._directory, self._lowest_generation, self._keep)
            return Image.create(path, generation, rank, wanted)


def _keep_alive(sock: socket.socket) -> None:
    """Ends a connection whose peer vanished without a word after some 25 seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
