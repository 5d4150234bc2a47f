"""A coordinator that comes back, and hosts that tell it how their trainers ended in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.checkpoint.description import Description
from elastic_train.config.job import Job
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.current_run import State
from elastic_train.controller.job_folder import JobFolder, job_store
from elastic_train.controller.resumption import open_data
from elastic_train.controller.wire import Message
from elastic_train.storage.json_lines import read_json_lines
from tests.controller.scripted_host import DP2, TOKEN, ScriptedHost
from tests.jobs import make_job


def leave_journal(job: Job, steps: int = 0) -> None:
    """Of a coordinator of run "us" that has formed generation 1, which has finished some ``steps``, and died."""
    folder = JobFolder(job)
    folder.open(open_data(job).digest)
    folder.decide(claim=0, run="us")
    folder.decide(claim=0, generation=1, layout=DP2, step=0, cause="start", reason="why", cost=4.0)
    for step in range(1, steps + 1):
        folder.steps.append({"step": step, "loss": 3.0, "grad_norm": 1.0, "seconds": 1.0, "generation": 1})
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


Look = Callable[[Coordinator, list[ScriptedHost]], Awaitable[None]]


def after_return(job: Job, stories: list[dict[str, Any]], look: Look, logged: int = 0) -> Coordinator:
    """A coordinator comes back, and hosts tell their ``stories``; ``look``, and the end of that.

    ``logged``: how many steps of generation 1 storage knows of.
    """

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

    leave_journal(job, logged)
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
        await leave(coordinator, hosts)

    told = {"description": Description((), 0).to_json()}
    stories = [told | {"steps": [{"message": stepped(rank, 1), "held": {}}]} for rank in (0, 1)]
    coordinator = after_return(small_job(corpus, tmp_path), stories, copy)
    assert coordinator.state == State.KILLED
    assert coordinator.log.finished_step == 1


async def leave(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
    for host in hosts:
        await host.hear("release")
        host.leave()  # so that there is nothing to save


def part_of_second(rank: int, **more: Any) -> dict[str, Any]:
    """Generation 2 has gone back from step 8 to 4; storage knows neither of the one nor of the other."""
    part = {"generation": 2, "rank": rank, "layout": DP2, "start_step": 4, "running": True}
    return {"part": part, "description": Description((), 0).to_json()} | more


def lines(job: Job, name: str) -> list[dict[str, Any]]:
    return read_json_lines(job_store(job), f"{name}.jsonl")


def test_steps_that_the_generation_before_had_lost_are_no_part_of_the_one_that_is_adopted(
    corpus: Path, tmp_path: Path
) -> None:
    async def go_on(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for host in hosts:
            assert (await host.hear("adopted"))["step"] == 5
        for rank, host in enumerate(hosts):
            host.tell("held", generation=2, rank=rank, step=6, node="ba"[rank], image=f"r{rank}")
        for host in hosts:
            assert (await host.hear("finished"))["step"] == 6
        coordinator.stop("enough seen")
        await leave(coordinator, hosts)

    said = [[{"message": stepped(rank, step), "held": {}} for step in (5, 6)] for rank in (0, 1)]
    stories = [part_of_second(rank, steps=said[rank], finished_step=5) for rank in (0, 1)]
    job = small_job(corpus, tmp_path)
    assert after_return(job, stories, go_on, logged=8).state == State.KILLED
    logged = [(line["step"], line["generation"]) for line in lines(job, "steps")]
    assert logged == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    back = [(line["from_step"], line["to_step"]) for line in lines(job, "ledger") if line["event"] == "rolled_back"]
    assert back == [(8, 4)]
    told = [(line["generation"], line["step"]) for line in lines(job, "journal") if "generation" in line]
    assert told == [(1, 0), (2, 4)]  # the next coordinator finds it


def test_images_that_the_generation_before_had_lost_are_of_no_use_to_the_next_one(corpus: Path, tmp_path: Path) -> None:
    """A node has come back with them while nobody was there to refuse it."""

    async def survey(coordinator: Coordinator, hosts: list[ScriptedHost]) -> None:
        for rank, host in enumerate(hosts):
            await host.hear("survey")
            host.tell("surveyed")
            await host.hear("tell_pool")
            images = [{"generation": 1, "rank": rank, "step": step, "image": f"i{step}"} for step in (4, 8)]
            about = {"generation": 1, "rank": rank, "description": Description((), 0).to_json()}
            host.tell("pool", images=images, descriptions=[about])
        for host in hosts:
            assigned = await host.hear("assign")
            assert (assigned["generation"], assigned["start_step"]) == (3, 4)
        coordinator.stop("enough seen")
        await leave(coordinator, hosts)

    stories = [part_of_second(rank, finished_step=4) for rank in (0, 1)]
    job = small_job(corpus, tmp_path)
    assert after_return(job, stories, survey, logged=8).state == State.KILLED
    assert [line["step"] for line in lines(job, "steps")] == [1, 2, 3, 4]


def test_steps_that_were_left_out_meanwhile_count_as_such(corpus: Path, tmp_path: Path) -> None:
    bad = {"skipped": "loss is nan", "seconds": 0.25}
    steps = [[stepped(rank, 1) | bad, stepped(rank, 2)] for rank in (0, 1)]
    stories = [{"steps": [{"message": said, "held": {}} for said in of_rank]} for of_rank in steps]
    told = {"description": Description((), 0).to_json(), "finished_step": 1}
    job = small_job(corpus, tmp_path, "failure.max_bad_steps=0")
    coordinator = after_return(job, [told | story for story in stories], leave)
    assert coordinator.state == State.FAILED
    assert "step 1: loss is nan; 1 of the last 64 steps were bad" in coordinator.message
    assert coordinator.run.time.report()["seconds"]["skipped"] == pytest.approx(2 * 0.25)
