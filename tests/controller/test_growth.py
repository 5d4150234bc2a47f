"""When newcomers are taken in: the decision, and real hosts that are or are not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.layout import Layout
from elastic_train.controller.growth import Growth, decide_growth
from elastic_train.planner.hardware_table import host_of
from elastic_train.planner.layouts import LayoutChoice, step_seconds
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

Lines = list[dict[str, Any]]

SETTING: dict[str, Any] = {
    "step_seconds": 2.0,
    "cost_ratio": 0.75,
    "steps_left": 1000,
    "pause": 5.0,
    "stable": math.inf,
    "horizon": 300.0,
    "margin": 1.0,
}


@pytest.mark.parametrize(
    ("changed", "gain", "grows"),
    [
        ({}, 75.0, True),  # 150 steps of 0.5 s each
        ({"steps_left": 11}, 5.5, True),
        ({"steps_left": 10}, 5.0, False),  # nearly over
        ({"steps_left": 0}, 0.0, False),
        ({"horizon": 20.0}, 5.0, False),
        ({"horizon": 22.0}, 5.5, True),
        ({"pause": 75.0}, 75.0, False),
        ({"margin": 15.0}, 75.0, False),
        ({"stable": 20.0}, 5.0, False),
        ({"stable": 21.0}, 5.25, True),
        ({"cost_ratio": 1.0}, 0.0, False),
        ({"cost_ratio": 1.1, "margin": 0.0}, -30.0, False),
        ({"steps_left": 1, "margin": 0.0}, 0.5, True),
    ],
)
def test_decision(changed: dict[str, Any], gain: float, grows: bool) -> None:
    decision = decide_growth(**SETTING | changed)
    assert decision.gain == pytest.approx(gain)
    assert decision.grows is grows
    assert decision.candidate_seconds == pytest.approx(2.0 * (SETTING | changed)["cost_ratio"])


def test_numbers_are_in_the_sentence() -> None:
    assert str(decide_growth(**SETTING | {"stable": 40.0})) == (
        "a step takes 2.000 s, by estimate 1.500 s with them; gain 10.00 s in 20 steps, pause 5.00 s; "
        "last host lost 40 s ago"
    )


class Run:
    """A run of steps of one second each on a clock of its own."""

    def __init__(self, tmp_path: Path, steps: int = 10_000) -> None:
        job = make_job(tmp_path, tmp_path, "growth", f"training.steps={steps}", "hosts.growth_margin=1")
        self.job = job
        self.now, self.step = 0.0, 0
        self.events: Lines = []
        self.growth = Growth(job, lambda event, **fields: self.events.append({"event": event, **fields}), self.clock)
        self._unit = step_seconds(job, Layout(dp_shard=3)) / 4.0
        self.growth.formed(choice(3, 4.0))

    def clock(self) -> float:
        return self.now

    def second(self, candidate: LayoutChoice | None) -> str | None:
        self.now += 1.0
        self.step += 1
        self.growth.step_finished(1.0)
        estimated = candidate and replace(candidate, cost=candidate.cost * self._unit)
        return self.growth.consider(estimated, self.step)


def choice(hosts: int, cost: float) -> LayoutChoice:
    return LayoutChoice(Layout(dp_shard=hosts), hosts, 0, [], cost)


def test_first_newcomer_is_taken_in_and_said_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    reasons = [run.second(choice(4, 3.0)) for _ in range(10)]
    assert reasons[0] is not None
    assert reasons[0].startswith("dp_shard3 -> dp_shard4: a step takes 1.000 s, by estimate 0.750 s with them; gain 75")
    assert "pause 5.00 s; no host lost" in reasons[0]
    assert [event["grows"] for event in run.events] == [True]


def test_no_faster_layout_is_nothing_to_consider(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.second(None) is None
    assert run.second(choice(4, 4.0)) is None
    assert run.events == []


def test_both_sides_are_estimated_for_the_same_machines(tmp_path: Path) -> None:
    """The layout that runs was estimated when hosts were others, or by a coordinator that died: that is no gain."""
    run = Run(tmp_path)
    faster = replace(host_of("cpu"), block_seconds=1e-4)
    same = step_seconds(run.job, Layout(dp_shard=3), faster)
    assert same < 0.9 * step_seconds(run.job, Layout(dp_shard=3))
    run.growth.step_finished(1.0)
    candidate = replace(choice(4, 0.0), cost=same, accelerator=faster)
    run.growth.formed(choice(3, 1000.0))
    run.growth.step_finished(1.0)
    assert run.growth.consider(candidate, 1) is None
    assert run.events == []
    assert run.growth.consider(replace(candidate, cost=0.75 * same), 1) is not None


def test_measured_pauses_replace_the_assumed_one(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=20)
    assert run.second(choice(4, 3.0)) is None  # 19 steps are 4.75 s, less than the 5 s that are assumed
    run.growth.running("start", 60.0)  # the start of the job says nothing about a re-forming
    assert run.second(choice(4, 3.0)) is None
    for seconds in (1.0, 2.0, 30.0):
        run.growth.running("host_lost", seconds)
    reason = run.second(choice(4, 3.0))
    assert reason is not None
    assert "pause 2.00 s" in reason
    assert [event["grows"] for event in run.events] == [False, True]


def test_flapping_host_is_left_out_until_it_stays(tmp_path: Path) -> None:
    """There for ten seconds, away for three, for hours: no re-forming, and hardly a line in the ledger."""
    run = Run(tmp_path)
    run.growth.host_lost()
    reasons = []
    for _ in range(200):
        reasons += [run.second(choice(4, 3.0)) for _ in range(10)]
        run.growth.host_lost()  # a spare: the generation goes on without it
        reasons += [run.second(None) for _ in range(3)]
    assert not any(reasons)
    assert len(run.events) == 1
    stays = [run.second(choice(4, 3.0)) for _ in range(40)]
    assert stays.index(next(filter(None, stays))) == 17  # 21 s after its last loss: 21 x 0.25 s > 5 s
    assert [event["grows"] for event in run.events] == [False, True]


@pytest.mark.slow
def test_newcomer_that_pays_is_taken_in(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    """The job is told that a pause is nothing; the curve is that of the run on one host."""
    with LocalJob(make_job(corpus, tmp_path, "grows", "parallel.pp=1", "hosts.start_wait_seconds=0")) as run:
        run.start_host("a0", "a")
        run.wait_step(1)
        run.pause_trainer()
        run.start_host("b1", "b")
        run.wait(lambda status: status["spares"] == 1)
        run.resume_trainer()
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        ledger = run.lines("ledger")
        considered = [event for event in ledger if event["event"] == "growth_considered"]
        start, grown = [event for event in ledger if event["event"] == "generation_formed"]
        assert [event["grows"] for event in considered] == [True]
        assert (start["layout"], grown["layout"], grown["cause"]) == ("single", "dp_shard2", "growth")
        assert grown["detail"].startswith("single -> dp_shard2: a step takes ")
        assert "2 hosts on 2 nodes: dp_shard2 takes " in grown["reason"]


@pytest.mark.slow
def test_newcomer_near_the_end_is_not_taken_in(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    overrides = ("parallel.pp=1", "hosts.start_wait_seconds=0", "hosts.growth_margin=100")
    with LocalJob(make_job(corpus, tmp_path, "late", *overrides)) as run:
        run.start_host("a0", "a")
        run.wait_step(1)
        run.pause_trainer()
        run.start_host("b1", "b")
        run.wait(lambda status: status["spares"] == 1 and bool(run.told("growth_considered")))
        run.resume_trainer()
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)
        assert [event["layout"] for event in run.told("generation_formed")] == ["single"]
        (considered,) = run.told("growth_considered")
        assert not considered["grows"]
