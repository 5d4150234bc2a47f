"""Generations that come to nothing, again and again: pauses grow, a suspect stands aside, and at last the job ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cluster.networks import Network
from elastic_train.config.layout import Layout
from elastic_train.controller import barren as barren_module
from elastic_train.controller.barren import Barren
from elastic_train.controller.coordinator import Coordinator
from elastic_train.controller.current_run import State
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.trouble import Trouble
from tests.controller.records import hosts
from tests.controller.scripted_host import TOKEN, ScriptedHost
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

Events = list[tuple[str, dict[str, Any]]]


def tracked(most: int = 100, can_do_without: Callable[[list[HostRecord]], bool] = lambda hosts: True) -> Any:
    events: Events = []
    return Barren(most, lambda event, **fields: events.append((event, fields)), can_do_without), events


def generation(members: list[HostRecord], start_step: int = 7) -> Generation:
    return Generation(3, Layout(dp_shard=len(members)), members, [[]] * len(members), start_step, Trouble("start", ""))


def test_pauses_grow_up_to_a_limit_and_the_first_recoveries_have_none() -> None:
    barren, events = tracked()
    made = generation(hosts("ab"))
    assert barren.ended(generation(hosts("ab"), 0), 7, Trouble("peer", "gloo")) == 0  # it had finished steps
    pauses = [barren.ended(made, 7, Trouble("peer", "gloo")) for _ in range(10)]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert [(event, fields["count"], fields["retry_seconds"]) for event, fields in events[:2]] == [
        ("barren_generation", 2, 1),
        ("barren_generation", 3, 2),
    ]
    assert events[0][1] | {"set_aside": None} == {
        "generation": 3,
        "count": 2,
        "most": 100,
        "cause": "peer",
        "detail": "gloo",
        "retry_seconds": 1.0,
        "set_aside": None,
    }


@pytest.mark.parametrize(("start", "finished"), [(7, 8), (8, 8)], ids=["by it", "by one that grew since"])
def test_a_finished_step_ends_the_count(start: int, finished: int) -> None:
    barren, _ = tracked()
    for _ in range(5):
        barren.ended(generation(hosts("ab"), 7), 7, Trouble("hang", ""))
    first = barren.ended(generation(hosts("ab"), start), finished, Trouble("hang", ""))
    assert first == 0
    assert barren.ended(generation(hosts("ab"), finished), finished, Trouble("hang", "")) == (0 if start == 7 else 1)


@pytest.mark.parametrize("kind", ["host_lost", "host_silent", "preemption", "trainer_killed", "exception", "no_room"])
def test_what_changes_the_next_generation_or_has_a_count_of_its_own_is_never_paused_for(kind: str) -> None:
    barren, events = tracked(most=2)
    for _ in range(5):
        assert barren.ended(generation(hosts("ab")), 7, Trouble(kind, "")) == 0
    assert barren.reason_to_end(Trouble(kind, "")) is None
    assert not events


def test_too_many_end_the_job_with_causes_and_hosts() -> None:
    barren, _ = tracked(most=4, can_do_without=lambda hosts: False)
    members = hosts("abc")
    for kind, named in (("peer", 0), ("copy_failed", 1), ("peer", 0)):
        barren.ended(generation(members), 7, Trouble(kind, "", hosts=(members[named],)))
        assert barren.reason_to_end(Trouble("peer", "")) is None
    assert barren.ended(generation(members), 7, Trouble("peer", "gloo said so", hosts=(members[0],))) == 0
    assert barren.reason_to_end(Trouble("peer", "gloo said so")) == (
        "gloo said so (4 generations in a row ended without a finished step, as many as failure.max_barren_generations "
        "allows: peer 3 times, copy_failed 1 times; named: host 1 (node a, pid 1001) 3 times, "
        "host 2 (node b, pid 1002) 1 times)"
    )


def test_who_is_named_most_often_stands_aside_for_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    barren, events = tracked()
    members = hosts("abc")
    made = generation(members)
    barren.ended(made, 7, Trouble("peer", "", hosts=(members[2],)))
    barren.ended(made, 7, Trouble("copy_failed", "", hosts=(members[1], members[2])))
    assert [member.suspected for member in members] == [False, False, True]
    without = generation(members[:2])
    barren.ended(without, 7, Trouble("peer", "", hosts=(members[0],)))
    assert [fields["set_aside"] for _, fields in events] == [3, 2]  # who has been in a pair before, rather than once
    now += 61
    assert not any(member.suspected for member in members)
    barren.ended(made, 7, Trouble("peer", "", hosts=(members[2],)))
    now += 61
    assert [member.suspected for member in members] == [False, False, True]


def test_nobody_stands_aside_whom_the_job_needs() -> None:
    barren, events = tracked(can_do_without=lambda hosts: False)
    members = hosts("ab")
    for _ in range(3):
        barren.ended(generation(members), 7, Trouble("peer", "", hosts=(members[0],)))
    assert not any(member.suspected for member in members)
    assert [fields["set_aside"] for _, fields in events] == [None, None]


# -- coordinators ----------------------------------------------------------------------------------------------------


def test_a_coordinator_pauses_tells_and_ends_the_job(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(barren_module, "FIRST_SECONDS", 0.01)
    fixed = ("parallel.pp=1", "hosts.max=2", "hosts.min=2", "failure.max_barren_generations=4")
    job, events = make_job(corpus, tmp_path, "barren", *fixed), list[dict[str, Any]]()

    async def play() -> Coordinator:
        coordinator = Coordinator(job, "127.0.0.1", TOKEN, events.append)
        members = [ScriptedHost(rank) for rank in (0, 1)]
        try:
            address = await coordinator.start()
            for host in members:
                await host.join(address)
                host.tell("ready", preload_seconds=0.0)
            for number in (1, 2, 3, 4):
                assigned = [await host.hear("assign") for host in members]
                rank = assigned[0]["rank"]
                echo = {"type": "error", "kind": "peer", "error": "gloo: no route", "traceback": ""}
                members[0].say(echo | {"generation": number, "rank": rank, "step": 1})
            await asyncio.wait_for(coordinator.ended.wait(), 60)
        finally:
            for host in members:
                host.leave()
            await coordinator.close()
        return coordinator

    coordinator = asyncio.run(play())
    assert coordinator.state == State.FAILED
    assert "gloo: no route (4 generations in a row ended without a finished step" in coordinator.message
    assert "peer 4 times; named: host 1 (node a, pid 1) 4 times" in coordinator.message
    told = [event for event in events if event["event"] == "barren_generation"]
    assert [(event["count"], event["set_aside"]) for event in told] == [(2, None), (3, None)]
    waits = [event["reason"] for event in events if event["event"] == "waiting"]
    assert len(waits) == 2 and "a finished step ends the count, 4 (failure.max_barren_generations) the job" in waits[0]
    assert [record.message for record in caplog.records if "without a finished step" in record.message] == waits


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_two_hosts_that_do_not_reach_each_other_are_not_used_together(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = make_job(corpus, tmp_path, "parted", "parallel.pp=1", "hosts.max=3", "failure.hang_seconds=3")
    with Network() as network, LocalJob(job, address=network.address) as run:
        machines = {node: network.add() for node in "abc"}
        machines["a"].part_from(machines["b"])
        for node, machine in machines.items():
            run.start_host(node, node, machine)
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        (formed,) = run.told("generation_formed")
        assert formed["layout"] == "dp_shard2"
        aside = {event["set_aside"] for event in run.told("barren_generation")}
        assert len(aside) == 1 and None not in aside
