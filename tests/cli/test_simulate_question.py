from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import asked_of
from elastic_train.config.faults import Kind
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.answer import Answer
from elastic_train.planner.simulation.events import replay
from tests.config.job_files import GOOD
from tests.planner.simulation.scenarios import failure


@pytest.mark.parametrize("recovery", ["elastic", "restart"])
def test_one_pause_is_that_of_every_recovery(recovery: str) -> None:
    """Also after a wait, with many hosts and from storage."""
    asked = Asked(nodes=64, min_nodes=64, pause=1800.0, mtbf_hours=100.0, recovery=recovery, runs=3)
    (case,) = asked_of(asked).cases
    costs = case.scenario.costs
    for kind in (None, *costs.pauses):
        assert costs.of(kind, 512, from_storage=True).total == pytest.approx(1800.0)
    outcomes = case.outcomes(False)
    paused = (Cause.DETECTION, Cause.TEARDOWN, Cause.FORM, Cause.RESTORE, Cause.FIRST_STEP)
    spent = statistics.fmean(sum(run.seconds.get(cause, 0.0) for cause in paused) / 512 for run in outcomes)
    # failures come every 5625 s and end a pause early: 5625 s (1 - exp(-1800 / 5625)) are left of it in the mean
    assert spent / statistics.fmean(run.interruptions for run in outcomes) == pytest.approx(1540, rel=0.05)


@pytest.mark.parametrize(("most", "told"), [(16, "the job uses no more"), (2, "the rest stands by"), (4, None)])
def test_a_job_never_uses_more_than_the_full_cluster(tmp_path: Path, most: int, told: str | None) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(GOOD + f"parallel: {{dp_shard: auto}}\nhosts: {{min: 1, max: {most}}}\n")
    question = asked_of(Asked(job=str(job), nodes=2, gpus_per_node=2, spares=2, days=1.0))
    outcome = replay(question.cases[0].scenario, [])
    assert outcome.progress == outcome.ettr == 1.0
    assert outcome.goodput == pytest.approx(min(most, 4) / 8)
    assert [note for note in question.notes if "asks for up to" in note and (told or note) in note] == (
        question.notes[:1] if told else []
    )


def test_a_restart_takes_the_replicas_that_are_left_when_it_may() -> None:
    """2 nodes of 8 are lost for good: 6 are 3 pairs, of which 75 % of the job's speed are left."""
    waits, shrinks = (
        asked_of(Asked(nodes=8, unit_nodes=2, min_nodes=least, recovery="restart", days=1.0, replace="9999d"))
        for least in (None, 5)
    )
    failures = [failure(43_200.0, Kind.KILL_NODE, node) for node in (0, 1)]
    assert replay(waits.cases[0].scenario, failures).waiting == pytest.approx(0.5)
    outcome = replay(shrinks.cases[0].scenario, failures)
    assert outcome.waiting == 0
    # 600 s of pause, 300 s of work at most to repeat, 1.7 % of the rest for saves
    assert outcome.progress == pytest.approx(0.5 + 0.5 * 0.75, abs=0.025)


def test_the_rate_of_failures_is_that_of_the_gpus() -> None:
    """419 failures of 16,384 GPUs in 54 days are one of 8 GPUs in 6,335 hours, of 4 in 12,669."""
    for each, hours in ((8, 6335), (4, 12_669), (1, 50_677)):
        failures = asked_of(Asked(nodes=4, gpus_per_node=each)).cases[0].scenario.failures
        assert failures.mtbf / 3600 == pytest.approx(hours, rel=1e-4)


def test_a_long_save_puts_the_next_one_off() -> None:
    saves = asked_of(Asked(nodes=4, checkpoint_takes=1800.0)).cases[0].scenario.saves
    assert (saves.every, saves.seconds) == (1800.0, 1800.0)


def test_one_replica_may_be_one_node_of_llama_3() -> None:
    scenario = asked_of(Asked(like="llama3", unit_nodes=1, runs=1)).cases[0].scenario
    share = scenario.throughput({8: 2047})
    assert share is not None and share.hosts == 8 * 2047


def test_only_failures_before_the_end_count(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 0, "kind": "kill-node"}\n{"at": 9000, "kind": "hang"}\n')
    question = asked_of(Asked(nodes=1, days=0.01, failures=str(trace)))
    assert f"; 1 failures of {trace}; 1 run from" in question.title
    answer = Answer("elastic", question.cases[0].outcomes(False))
    assert answer.shares() == {}  # the only node has gone at once: nobody was there for a second
    assert answer.figures()["waiting %"].mean == 100.0
