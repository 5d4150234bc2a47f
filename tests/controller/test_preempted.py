"""Notices of Google Cloud, asked of a real HTTP server that answers as its metadata service does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_train.controller.preempted import Preempted
from elastic_train.controller.spot_notice import NoAnswer
from tests.spot_instance import Metadata, running_metadata


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with running_metadata() as server:
        server.answer = (200, b"FALSE")
        yield server


def test_nothing_then_a_notice_whose_end_comes_nearer(metadata: Metadata) -> None:
    now = [100.0]
    service = Preempted(metadata.url, clock=lambda: now[0])
    assert service.ask() is None
    metadata.answer = (200, b"TRUE\n")
    assert service.ask() == (30.0, "preempted")
    now[0] = 112.0
    assert service.ask() == (18.0, "preempted")
    assert metadata.tokens == {}


@pytest.mark.parametrize("answer", [(404, b""), (403, b"TRUE"), (200, b""), (200, b"true"), (200, b"\xff" * 100)])
def test_another_answer_is_no_notice(metadata: Metadata, answer: tuple[int, bytes]) -> None:
    metadata.answer = answer
    with pytest.raises(NoAnswer, match="not TRUE or FALSE"):
        Preempted(metadata.url).ask()


def test_no_service(metadata: Metadata) -> None:
    with pytest.raises(NoAnswer, match="gets no answer"):
        Preempted("http://127.0.0.1:1").ask()
