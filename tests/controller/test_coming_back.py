"""A coordinator that comes back, and hosts that tell it how their trainers ended in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.description import Description
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.current_run import State
from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.resumption import open_data
from elastic_train.controller.wire import Connection, Message
from tests.jobs import make_job

TOKEN = "token"
DP2 = Layout(dp_shard=2).as_dict()


def leave_journal(job: Job) -> None:
    """Of a coordinator of run "us" that has formed generation 1 and died."""
    folder = JobFolder(job)
    folder.open(open_data(job).digest)
    folder.decide(claim=0, run="us")
    folder.decide(claim=0, generation=1, layout=DP2, step=0, cause="start", reason="why", cost=4.0)
    folder.close()


def error(rank: int, kind: str) -> Message:
    told = {"type": "error", "generation": 1, "rank": rank, "step": 1, "kind": kind}
    return told | {"error": f"{kind} of rank {rank}", "traceback": "Traceback of the trainer"}


def stepped(rank: int, step: int) -> Message:
    """Rank's image is copied to the other host's node."""
    told = {"type": "stepped", "generation": 1, "rank": rank, "step": step, "image": f"r{rank}"}
    told |= {"copies": ["ba"[rank]], "loss": 3.0, "grad_norm": 1.0, "lr": 0.1, "valid_tokens": 8, "seconds": 1.0}
    told |= {"snapshot_seconds": 0.0, "stall_seconds": 0.0, "data_seconds": 0.0, "eval_seconds": 0.0}
    return told | {"own_seconds": 0.5, "cpu_wait_seconds": 0.1, "slots": [0, 8], "batch": f"{step:016x}"}


class ScriptedHost:
    """Speaks a host's protocol; has no trainer and no images."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def come_back(self, address: tuple[str, int], **told: Any) -> None:
        """``told``: what its story says of its trainer."""
        self._connection = Connection(*await asyncio.open_connection(*address))
        about = {"node": "ab"[self._rank], "address": "127.0.0.1", "bytes": ["127.0.0.1", 1], "pool": "", "images": []}
        self.tell("join", token=TOKEN, pid=self._rank + 1, host=self._rank + 1, **about)
        running = not told.get("last_words")
        part = {"generation": 1, "rank": self._rank, "layout": DP2, "start_step": 0, "running": running}
        known = {"description": None, "last_words": [], "steps": [], "finished_step": 0, "trainer_pid": None}
        self.tell("story", part=part, **known | told)
        self.tell("ready", preload_seconds=0.0)

    def tell(self, kind: str, **fields: Any) -> None:
        self.say({"type": kind, **fields})

    def say(self, message: Message) -> None:
        self._connection.send(message)

    async def hear(self, kind: str) -> Message:
        """The next message of that kind."""
        while (message := await self._connection.receive()) is not None and message["type"] != "stop":
            if message["type"] == kind:
                return message
        raise AssertionError(f"the coordinator said {message} and no {kind!r}")

    async def survey(self) -> None:
        await self.hear("survey")
        self.tell("surveyed")
        await self.hear("tell_pool")
        self.tell("pool", images=[], descriptions=[])

    def leave(self) -> None:
        self._connection.close()


Look = Callable[[Coordinator, list[ScriptedHost]], Awaitable[None]]


def after_return(job: Job, stories: list[dict[str, Any]], look: Look) -> Coordinator:
    """A coordinator comes back, and hosts tell their ``stories``; ``look``, and the end of that."""

    async def play() -> Coordinator:
        coordinator = Coordinator(job, "127.0.0.1", TOKEN, lambda event: None, "us")
        hosts = [ScriptedHost(rank) for rank in (0, 1)]
        try:
            address = await coordinator.start()
            for host, told in zip(hosts, stories, strict=True):
                await host.come_back(address, **told)
            await look(coordinator, hosts)
            await asyncio.wait_for(coordinator.ended.wait(), 60)
        finally:
            for host in hosts:
                host.leave()
            await coordinator.close()
        return coordinator

    leave_journal(job)
    return asyncio.run(play())


def after_error(job: Job, kind: str, look: Look | None = None) -> Coordinator:
    """As ``after_return``; the trainers of both hosts had an error of ``kind`` meanwhile."""

    async def survey(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for host in hosts:
            await host.survey()
        if look is not None:
            await look(coordinator, hosts)

    return after_return(job, [{"last_words": [error(rank, kind)]} for rank in (0, 1)], survey)


def small_job(corpus: Path, tmp_path: Path, *overrides: str) -> Job:
    return make_job(corpus, tmp_path, "back", "parallel.pp=1", "hosts.max=2", "hosts.min=2", *overrides)


def test_an_error_that_nobody_was_there_to_hear_counts(corpus: Path, tmp_path: Path) -> None:
    async def once_more(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for host in hosts:
            assert (await host.hear("assign"))["generation"] == 2
        hosts[0].say(error(0, "exception") | {"generation": 2})

    job = small_job(corpus, tmp_path, "failure.max_errors=2")
    coordinator = after_error(job, "exception", once_more)
    assert coordinator.state == State.FAILED
    assert "exception of rank 0 (2 times in a row)" in coordinator.message


def test_an_error_that_is_one_too_many_ends_the_job_with_its_traceback(corpus: Path, tmp_path: Path) -> None:
    coordinator = after_error(small_job(corpus, tmp_path, "failure.max_errors=1"), "exception")
    assert coordinator.state == State.FAILED
    assert "exception of rank 0 (1 times in a row)" in coordinator.message
    assert coordinator.run.traceback == "Traceback of the trainer"
    assert coordinator.run.generation_count == 1


def test_a_bad_step_that_nobody_was_there_to_hear_of_is_not_tried_a_third_time(corpus: Path, tmp_path: Path) -> None:
    async def stop(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for host in hosts:
            assert (await host.hear("assign"))["no_retry"] == [1]
        coordinator.stop("enough seen")

    assert after_error(small_job(corpus, tmp_path), "bad_step", stop).state == State.KILLED


def test_a_bad_step_that_nobody_was_there_to_hear_of_ends_the_job_by_its_policy(corpus: Path, tmp_path: Path) -> None:
    coordinator = after_error(small_job(corpus, tmp_path, "failure.bad_step=end"), "bad_step")
    assert coordinator.state == State.FAILED
    assert "bad_step of rank 0" in coordinator.message


def test_a_generation_is_adopted_before_its_first_step_is_whole(corpus: Path, tmp_path: Path) -> None:
    async def copy(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for host in hosts:
            assert (await host.hear("adopted"))["step"] == 0
        for rank, host in enumerate(hosts):
            host.tell("held", generation=1, rank=rank, step=1, node="ba"[rank], image=f"r{rank}")
        for host in hosts:
            assert (await host.hear("finished"))["step"] == 1
        coordinator.stop("enough seen")
        for host in hosts:
            await host.hear("release")
            host.leave()  # so that there is nothing to save

    told = {"description": Description((), 0).to_json()}
    stories = [told | {"steps": [{"message": stepped(rank, 1), "held": {}}]} for rank in (0, 1)]
    coordinator = after_return(small_job(corpus, tmp_path), stories, copy)
    assert coordinator.state == State.KILLED
    assert coordinator.log.finished_step == 1


def test_steps_that_were_left_out_meanwhile_count_as_such(corpus: Path, tmp_path: Path) -> None:
    async def leave(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for host in hosts:
            await host.hear("release")
            host.leave()

    bad = {"skipped": "loss is nan", "seconds": 0.25}
    steps = [[stepped(rank, 1) | bad, stepped(rank, 2)] for rank in (0, 1)]
    stories = [{"steps": [{"message": said, "held": {}} for said in of_rank]} for of_rank in steps]
    told = {"description": Description((), 0).to_json(), "finished_step": 1}
    job = small_job(corpus, tmp_path, "failure.max_bad_steps=0")
    coordinator = after_return(job, [told | story for story in stories], leave)
    assert coordinator.state == State.FAILED
    assert "step 1: loss is nan; 1 of the last 64 steps were bad" in coordinator.message
    assert coordinator.run.time.report()["seconds"]["skipped"] == pytest.approx(2 * 0.25)
