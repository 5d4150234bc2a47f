"""Spot notices, asked of a real HTTP server that answers as the metadata service of AWS does."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elastic_train.controller.spot_notice import NoAnswer, SpotNotice

END = "2026-09-18T08:22:00Z"
END_SECONDS = datetime(2026, 9, 18, 8, 22, tzinfo=UTC).timestamp()
NOTICE = json.dumps({"action": "terminate", "time": END}).encode()


class Metadata(ThreadingHTTPServer):
    """The service of one instance. Tokens are worth ``uses`` requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: tuple[int, bytes] = (404, b"<html>not found</html>")
        self.token_status, self.uses, self.stalls = 200, 1000, threading.Event()
        self.tokens: dict[str, int] = {}
        self.asked = 0
        self.stalls.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        token = f"token-{len(self.server.tokens)}"
        self.server.tokens[token] = self.server.uses
        self._answer(self.server.token_status if known else 400, token.encode())

    def do_GET(self) -> None:
        self.server.asked += 1
        self.server.stalls.wait(30)
        token = self.headers["X-aws-ec2-metadata-token"]
        if self.server.tokens.get(token, 0) < 1:
            self._answer(401, b"")
        elif self.path != "/latest/meta-data/spot/instance-action":
            self._answer(400, b"")
        else:
            self.server.tokens[token] -= 1
            self._answer(*self.server.answer)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never to be asked
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.stalls.set()
        server.shutdown()
        thread.join()


def test_nothing_then_a_notice(metadata: Metadata) -> None:
    service = SpotNotice(metadata.url + "/", clock=lambda: END_SECONDS - 120)
    assert service.ask() is None
    metadata.answer = (200, NOTICE)
    assert service.ask() == (120.0, "terminate")
    assert len(metadata.tokens) == 1


def test_a_token_that_has_run_out_is_replaced(metadata: Metadata) -> None:
    metadata.uses = 1
    service = SpotNotice(metadata.url)
    assert [service.ask() for _ in range(3)] == [None, None, None]
    assert len(metadata.tokens) == 3
    metadata.uses = 0
    with pytest.raises(NoAnswer, match="status 401"):
        service.ask()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b'{"action": "terminate"}',
        b'{"action": "terminate", "time": "soon"}',
        b'{"action": "terminate", "time": 5}',
        b'{"action": "dance", "time": "2026-09-18T08:22:00Z"}',
        b'{"action": ["stop"], "time": "2026-09-18T08:22:00Z"}',
        b"[" * 4000,
        b"\xff\xfe",
    ],
)
def test_garbage_is_no_notice(metadata: Metadata, body: bytes) -> None:
    metadata.answer = (200, body)
    with pytest.raises(NoAnswer, match="a notice"):
        SpotNotice(metadata.url).ask()


def test_no_service_no_token_no_answer(metadata: Metadata) -> None:
    metadata.token_status = 403
    with pytest.raises(NoAnswer, match="status 403"):
        SpotNotice(metadata.url).ask()
    metadata.token_status = 200
    metadata.answer = (500, b"")
    with pytest.raises(NoAnswer, match="status 500"):
        SpotNotice(metadata.url).ask()
    with pytest.raises(NoAnswer, match="gets no answer"):
        SpotNotice("http://127.0.0.1:1").ask()
    metadata.stalls.clear()
    with pytest.raises(NoAnswer, match="timed out"):
        SpotNotice(metadata.url).ask()


def test_watching_tells_once_and_complains_once(metadata: Metadata, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[float, str]] = []

    async def asked(times: int) -> None:
        wanted = metadata.asked + times
        while metadata.asked < wanted:
            await asyncio.sleep(0.005)

    async def watch() -> None:
        service = SpotNotice(metadata.url, clock=lambda: END_SECONDS - 90)
        task = asyncio.ensure_future(service.watch(lambda *notice: told.append(notice), pause=0.001))
        metadata.answer = (200, b"garbage")
        await asked(5)
        metadata.answer = (200, NOTICE)
        await asked(5)
        metadata.answer = (200, NOTICE.replace(b"08:22", b"08:21"))
        await asked(5)
        task.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(watch(), 60))
    assert told == [
        (90.0, "spot notice: terminate at 2026-09-18T08:22:00Z"),
        (30.0, "spot notice: terminate at 2026-09-18T08:21:00Z"),
    ]
    assert len(caplog.records) == 1
    assert "not understood" in caplog.text


def test_times_that_are_past_are_no_time_at_all(metadata: Metadata) -> None:
    told: list[tuple[float, str]] = []
    metadata.answer = (200, NOTICE)

    async def watch() -> None:
        service = SpotNotice(metadata.url, clock=time.time)
        task = asyncio.ensure_future(service.watch(lambda *notice: told.append(notice), pause=0.001))
        while not told:
            await asyncio.sleep(0.005)
        task.cancel()

    asyncio.run(asyncio.wait_for(watch(), 60))
    assert told[0][0] == 0.0
