"""Spot notices, asked of a real HTTP server that answers as the metadata service of AWS does."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from elastic_train.controller.spot_notice import NoAnswer, SpotNotice
from tests.spot_instance import Metadata, running_metadata

END = "2026-09-18T08:22:00Z"
END_SECONDS = datetime(2026, 9, 18, 8, 22, tzinfo=UTC).timestamp()
NOTICE = json.dumps({"action": "terminate", "time": END}).encode()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # never to be asked
    with running_metadata() as server:
        yield server


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
