from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.config.layout import Layout
from elastic_train.config.operation import FailureConfig
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.stragglers import Own, StragglerJudge, Stragglers
from elastic_train.controller.trouble import Trouble
from tests.cgroups import cgroup
from tests.controller.records import hosts
from tests.jobs import make_job
from tests.local_job import LocalJob
from tests.recovered import assert_recovered


def judged(judge: StragglerJudge, steps: list[list[Own]]) -> list[tuple[int, float] | None]:
    return [judge.step(step) for step in steps]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_shard=8), Layout(pp=2, dp_shard=4), Layout(pp=4)])
def test_equal_hosts_are_never_named(layout: Layout, seed: int) -> None:
    """Steps of uneven length, and now and then a hiccup of one host that takes as long as all the steps."""
    noise = random.Random(seed)

    def step() -> list[Own]:
        waits = [noise.expovariate(2.0) + (100.0 if noise.random() < 0.002 else 0.0) for _ in range(layout.world_size)]
        length = 1.0 + noise.random()
        return [(length + wait, wait) for wait in waits]

    judge = StragglerJudge(layout, 2.0, 20)
    assert judged(judge, [step() for _ in range(1000)]) == [None] * 1000


@pytest.mark.parametrize("layout", [Layout(dp_shard=3), Layout(pp=3), Layout(dp_shard=2)], ids=str)
def test_slow_host_is_found_when_it_was_slow_long_enough(layout: Layout) -> None:
    judge = StragglerJudge(layout, 2.0, 8)
    equal = [(1.0, 0.1)] * layout.world_size
    slow = [*equal[:-1], (3.0, 2.0)]
    found = judged(judge, [equal] * 8 + [slow] * 8)
    assert found[:15] == [None] * 15
    assert found[15] is not None and found[15][0] == layout.world_size - 1 and found[15][1] > 2.0


def test_a_host_that_recovers_begins_anew() -> None:
    judge = StragglerJudge(Layout(dp_shard=2), 2.0, 8)
    slow: list[Own] = [(1.0, 0.0), (3.0, 2.0)]
    assert judged(judge, [slow] * 6 + [[(1.0, 0.0)] * 2] * 2 + [slow] * 7) == [None] * 15


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=9))
def test_the_others_are_the_median_of_all_but_oneself(costs: list[float]) -> None:
    judge = StragglerJudge(Layout(dp_shard=len(costs)), 1e-9, 4)
    steps = judged(judge, [[(cost, 0.0) for cost in costs]] * 4)
    ratios = [cost / median(costs[:rank] + costs[rank + 1 :]) for rank, cost in enumerate(costs)]
    assert steps[3] is not None and steps[3][1] == pytest.approx(max(ratios))


def test_a_quota_that_is_felt_every_other_step_is_felt() -> None:
    judge = StragglerJudge(Layout(dp_shard=2), 2.0, 8)
    steps: list[list[Own]] = [[(1.0, 0.0), (1.0, 0.0)], [(1.0, 0.0), (9.0, 8.0)]] * 4
    assert judged(judge, steps)[-1] == (1, 5.0)


def test_unequal_stages_are_compared_by_what_they_wait_for_a_cpu() -> None:
    judge = StragglerJudge(Layout(pp=2), 2.0, 8)
    assert judged(judge, [[(1.0, 0.1), (9.0, 0.9)]] * 20) == [None] * 20


class Told(list[dict[str, Any]]):
    def record(self, event: str, **fields: Any) -> None:
        self.append(fields)


def slow_steps(stragglers: Stragglers, generation: Generation, count: int) -> list[Trouble | None]:
    """Steps in which rank 1 is slow."""
    troubles = []
    for step in range(1, count + 1):
        generation.stepped = {step: {0: own(1.0), 1: own(5.0)}}
        troubles.append(stragglers.look(generation, step))
    return troubles


def own(seconds: float) -> dict[str, Any]:
    return {"own_seconds": seconds, "cpu_wait_seconds": seconds - 1.0}


@pytest.mark.parametrize("policy", ["replace", "name", "off"])
@pytest.mark.parametrize("spares", [0, 1])
def test_policies(policy: Any, spares: int) -> None:
    there, told = hosts("abc"[: 2 + spares]), Told()
    failure = FailureConfig(straggler=policy, straggler_steps=4)
    stragglers = Stragglers(failure, 1, lambda: there, told.record)
    generation = Generation(1, Layout(dp_shard=2), there[:2], [[], []], 0, Trouble("start", ""))
    troubles = slow_steps(stragglers, generation, 5)
    replaced = policy == "replace" and spares > 0
    assert [fields["host"] for fields in told] == ([] if policy == "off" else [2])
    assert [fields["replaced"] for fields in told] == ([] if policy == "off" else [replaced])
    assert [trouble is not None for trouble in troubles] == [False] * 4 + [replaced]
    expected: list[HostRecord] = [there[0], there[2]] if replaced else there
    assert stragglers.candidates(Layout(dp_shard=2)) == expected
    assert stragglers.candidates(Layout(dp_shard=3)) == there  # nobody can be spared


def test_suspects_are_taken_after_slow_hosts_and_both_before_nobody() -> None:
    there = hosts("abcd")
    stragglers = Stragglers(FailureConfig(), 1, lambda: there, Told().record)
    there[0].suspected_until, there[1].slow = time.time() + 600, True
    assert stragglers.candidates(Layout(dp_shard=2)) == [there[2], there[3]]
    assert stragglers.candidates(Layout(dp_shard=3)) == [there[1], there[2], there[3]]
    assert stragglers.candidates(Layout(dp_shard=4)) == there
    there[0].suspected_until = time.time() - 1
    assert stragglers.candidates(Layout(dp_shard=3)) == [there[0], there[2], there[3]]


def test_a_straggler_is_named_once_and_replaced_when_a_spare_comes() -> None:
    there, told = hosts("ab"), Told()
    stragglers = Stragglers(FailureConfig(straggler_steps=4), 1, lambda: there, told.record)
    generation = Generation(1, Layout(dp_shard=2), there[:2], [[], []], 0, Trouble("start", ""))
    assert slow_steps(stragglers, generation, 9) == [None] * 9
    there.append(hosts("abc")[2])
    assert slow_steps(stragglers, generation, 1) != [None]
    assert [fields["replaced"] for fields in told] == [False, True]


@pytest.mark.slow
def test_slowed_host_gives_its_place_to_the_spare(
    corpus: Path, reference: list[dict[str, Any]], tmp_path: Path
) -> None:
    fixed = ("parallel.pp=1", "parallel.dp_shard=2", "hosts.min=2", "hosts.max=3")
    job = make_job(corpus, tmp_path, "slow", *fixed, "failure.straggler_steps=8")
    with cgroup("cpu", cpu__cfs_quota_us="8000") as slow, LocalJob(job) as run:  # of every 100 ms
        run.start_hosts("abc")
        status = run.wait_step(2)
        (member,) = [host for host in status["hosts"] if host["rank"] == 1]
        os.kill(member["trainer_pid"], signal.SIGSTOP)  # else the job could be over before
        for process in psutil.Process(member["pid"]).children(recursive=True):
            (slow / "cgroup.procs").write_text(str(process.pid))
        os.kill(member["trainer_pid"], signal.SIGCONT)
        run.wait(lambda status: status["generation"] == 2)
        (slow / "cpu.cfs_quota_us").write_text("-1")
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "straggler"])
        ledger = run.lines("ledger")
    (named,) = [event for event in ledger if event["event"] == "straggler"]
    assert (named["rank"], named["host"], named["node"]) == (1, member["id"], member["node"])
    assert named["factor"] > 2 and named["replaced"]
    generations = [event for event in ledger if event["event"] == "generation_formed"]
    assert {event["layout"] for event in generations} == {"dp_shard2"}
    assert not [event for event in ledger if event["event"] in ("trouble", "rolled_back")]
