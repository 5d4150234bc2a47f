"""A proxy in front of a real S3 server that breaks a share of the requests, in every way that a network can.

It passes the ``Host`` header on unchanged, so a client signs for the proxy's address and the server accepts that.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from tests.s3_server import S3Server

Fault = Literal[
    "500",  # the server never sees the request
    "503",
    "500, answer lost",  # the server has done what was asked
    "503, answer lost",
    "reset, answer lost",
    "reset in the request",  # half of the body has reached the server
    "reset in the answer",
    "answer cut",  # closed in the middle, with the right Content-Length
    "wrong length",  # a shorter body, Content-Length and Content-Range agree with it
    "bit flipped",
    "late",
]
ALL: tuple[Fault, ...] = (
    "500",
    "503",
    "500, answer lost",
    "503, answer lost",
    "reset, answer lost",
    "reset in the request",
    "reset in the answer",
    "answer cut",
    "wrong length",
    "bit flipped",
    "late",
)
OF_ANSWERS: dict[str, tuple[Fault, ...]] = {
    "GET": ("reset in the answer", "answer cut", "wrong length", "bit flipped"),
    "POST": ("answer cut", "bit flipped"),
}
"""Faults of a body, by the methods whose answers have one."""
NOT_OF_ANSWERS = set(ALL) - set(OF_ANSWERS["GET"])
Outage = Literal["none", "refuse", "silent"]
REASONS = {200: "OK", 206: "Partial Content", 500: "Internal Server Error", 503: "Slow Down"}


@dataclass
class Message:
    """A request or an answer; header names in lower case."""

    start: str
    headers: dict[str, str]
    body: bytes

    @property
    def words(self) -> list[str]:
        return self.start.split(" ", 2)

    def head(self) -> bytes:
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def answer(status: int, code: str, detail: str = "", **headers: str) -> Message:
    """An S3 error."""
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>injected</Message>{detail}</Error>"
    ).encode()
    fields = {"content-type": "application/xml", "content-length": str(len(body))}
    return Message(f"HTTP/1.1 {status} {REASONS.get(status, 'Refused')}", fields | headers, body)


@dataclass
class ChaosProxy:
    """Set ``share`` (of requests) and ``faults`` at any time; ``always`` answers everything instead of the server.

    ``injected`` counts faults, ``requests`` has (method, target) of all that arrived.
    """

    server: S3Server
    seed: int = 1
    share: float = 0.0
    faults: tuple[Fault, ...] = ALL
    latency_seconds: float = 0.2
    always: Message | None = None
    injected: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str]] = field(default_factory=list)
    _outage: Outage = "none"

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._target = int(self.server.endpoint_url.rpartition(":")[2])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self._over = asyncio.Event()
        self.port = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def outage(self, kind: Outage) -> None:
        """``refuse``: nobody listens. ``silent``: connections are taken and never answered. ``none``: the end of it."""
        asyncio.run_coroutine_threadsafe(self._set_outage(kind), self._loop).result(10)

    async def _set_outage(self, kind: Outage) -> None:
        self._outage = kind
        if kind == "none":
            self._over.set()
            self._over = asyncio.Event()
            if self._listener is None:
                await self._listen()
        elif kind == "refuse":
            self._stop_listening()
            self._abort_all()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**26)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _abort_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self) -> None:
        self._stop_listening()
        self._over.set()
        self._abort_all()
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one connection ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._handle(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False when the connection is over."""
        request = await _read_head(reader)
        if request is None:
            return False
        if self._outage != "none":
            self.injected["outage"] += 1
            await self._over.wait()
            writer.transport.abort()
            return False
        method, target, _ = request.words
        self.requests.append((method, target))
        fault = self._draw(method)
        if request.headers.pop("expect", ""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(request.headers.get("content-length", 0))
        if fault == "reset in the request":
            await self._half_a_request(request, await reader.readexactly(length // 2))
            writer.transport.abort()
            return False
        request.body = await reader.readexactly(length)
        return await self._answer(request, fault, writer)

    def _draw(self, method: str) -> Fault | None:
        if self._random.random() >= self.share:
            return None
        of_answers = [fault for fault in self.faults if fault in OF_ANSWERS.get(method, ())]
        others = [fault for fault in self.faults if fault in NOT_OF_ANSWERS]
        fits = of_answers if of_answers and (self._random.random() < 0.5 or not others) else others
        if not fits:
            return None
        fault = self._random.choice(fits)
        self.injected[fault] += 1
        return fault

    async def _answer(self, request: Message, fault: Fault | None, writer: asyncio.StreamWriter) -> bool:
        if fault == "late":
            await asyncio.sleep(self._random.random() * self.latency_seconds)
        if self.always is not None:
            made = self.always
        elif fault in ("500", "503"):
            made = self._refusal(fault)
        else:
            made = await self._forward(request)
        if fault == "reset, answer lost":
            writer.transport.abort()
            return False
        if fault in ("500, answer lost", "503, answer lost"):
            made = self._refusal(fault)
        body = b"" if request.words[0] == "HEAD" else made.body
        if body and fault == "bit flipped":
            body = _flip(body, self._random.randrange(8 * len(body)))
        if body and fault == "wrong length":
            body = _shorten(made, body, self._random.randrange(len(body)))
        if fault in ("reset in the answer", "answer cut"):
            writer.write(made.head() + body[: len(body) // 2])
            await writer.drain()
            if fault == "reset in the answer":
                writer.transport.abort()
            return False
        writer.write(made.head() + body)
        await writer.drain()
        return True

    def _refusal(self, fault: str) -> Message:
        if fault.startswith("500"):
            return answer(500, "InternalError")
        return answer(503, "SlowDown", **({"retry-after": "1"} if self._random.random() < 0.2 else {}))

    async def _forward(self, request: Message) -> Message:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target, limit=2**26)
        try:
            writer.write(Message(request.start, request.headers | {"connection": "close"}, b"").head() + request.body)
            await writer.drain()
            made = await _read_head(reader)
            if made is None:
                raise ConnectionResetError
            has_body = request.words[0] != "HEAD" and int(made.words[1]) not in (204, 304)
            made.body = await _read_body(reader, made.headers) if has_body else b""
            made.headers.pop("connection", None)
            if has_body:
                made.headers["content-length"] = str(len(made.body))
            return made
        finally:
            writer.close()

    async def _half_a_request(self, request: Message, half: bytes) -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._target)
            writer.write(request.head() + half)
            await writer.drain()
            writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> Message | None:
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    start, *lines = text.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return Message(start, {name.strip().lower(): value.strip() for name, _, value in pairs}, b"")


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.pop("transfer-encoding", "") != "chunked":
        return await (
            reader.readexactly(int(headers["content-length"])) if "content-length" in headers else reader.read()
        )
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return body


def _flip(body: bytes, bit: int) -> bytes:
    damaged = bytearray(body)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _shorten(made: Message, body: bytes, length: int) -> bytes:
    made.headers["content-length"] = str(length)
    if "content-range" in made.headers and length and made.words[1] == "206":
        span, _, total = made.headers["content-range"].partition("/")
        begin = int(span.removeprefix("bytes ").partition("-")[0])
        made.headers["content-range"] = f"bytes {begin}-{begin + length - 1}/{total}"
    return body[:length]


@contextmanager
def chaos(server: S3Server, share: float = 0.0, seed: int = 1) -> Iterator[ChaosProxy]:
    """A running proxy in front of ``server``."""
    proxy = ChaosProxy(server, seed=seed, share=share)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
