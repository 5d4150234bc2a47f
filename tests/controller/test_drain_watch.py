"""Drained nodes are told of once, whatever the asking costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from elastic_train.controller.drain_watch import DrainWatch

Answer = dict[str, float | None] | Exception


def watched(*answers: Answer) -> list[tuple[str, float | None, str]]:
    told: list[tuple[str, float | None, str]] = []
    left: Iterator[Answer] = iter(answers)

    async def watch() -> None:
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ask() -> dict[str, float | None]:
            answer = next(left, None)
            if answer is None:
                loop.call_soon_threadsafe(asked.set)
                return {}
            if isinstance(answer, Exception):
                raise answer
            return answer

        task = asyncio.ensure_future(DrainWatch(ask, lambda *drain: told.append(drain)).watch(pause=0.0))
        await asked.wait()
        task.cancel()

    asyncio.run(asyncio.wait_for(watch(), 60))
    return told


def test_each_node_is_told_of_once() -> None:
    told = watched({}, {"a": 20.0}, {"a": 19.0, "b": None}, {"b": None}, {})
    assert told == [("a", 20.0, "drained by Ray"), ("b", None, "drained by Ray")]


def test_a_node_that_is_drained_again_is_told_of_again() -> None:
    assert [node for node, _, _ in watched({"a": 20.0}, {}, {"a": 30.0})] == ["a", "a"]


def test_no_answer_is_logged_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        told = watched(RuntimeError("no control"), RuntimeError("no control"), {"a": 5.0})
    assert told == [("a", 5.0, "drained by Ray")]
    assert caplog.text.count("Ray does not say which nodes are drained: no control") == 1
