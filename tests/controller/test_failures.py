"""Real hosts and trainers (without Ray) die; the run must end with the steps, samples and losses it would have had."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic_train.controller.finished_steps import FinishedSteps
from elastic_train.data.corpus import open_corpus
from elastic_train.data.prepare import prepare
from elastic_train.data.sources import open_training
from tests.jobs import VOCABULARY, assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.ray_job import alive, until_none
from tests.recovered import assert_recovered

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]

PP2_DP2 = ("parallel.pp=2", "hosts.min=2")


def formed(run: LocalJob) -> Lines:
    return [event for event in run.lines("ledger") if event["event"] == "generation_formed"]


def assert_nothing_left(run: LocalJob, pids: list[int]) -> None:
    until_none(lambda: alive(pids))  # a trainer dies when its host does, which may be seen before it
    assert not list(Path(run.job.snapshot.directory).glob(f"elastic_train-{run.job.name}-*"))


def test_killed_trainer_costs_no_finished_step(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with LocalJob(make_job(corpus, tmp_path, "trainer", *PP2_DP2)) as run:
        run.start_hosts("aabb")
        before = run.wait_step(5)
        trainers = run.trainer_pids()
        os.kill(trainers[-1], signal.SIGKILL)
        after = run.wait(lambda status: status["generation"] == 2 and status["state"] == "running")
        assert [h["pid"] for h in after["hosts"]] == [h["pid"] for h in before["hosts"]]
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "trainer_killed"])
        last = formed(run)[-1]
        assert last["layout"] == "pp2 x dp_shard2"
        assert last["step"] >= before["step"]
        assert "SIGKILL" in last["detail"]
        assert set(last["restored_bytes"]) == {"image"}
        assert_nothing_left(run, [*trainers, *(h["pid"] for h in before["hosts"])])


def test_trainer_killed_when_only_the_news_of_the_last_step_is_missing(
    corpus: Path, reference: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to compute, so no generation is formed for it: the job ends with what is in memory."""
    job = make_job(corpus, tmp_path, "end", "parallel.pp=1", "hosts.max=2")
    tell = FinishedSteps.finish_if_whole

    def deaf_at_the_end(self: FinishedSteps, number: int, step: int) -> None:
        if step < job.training.steps:
            tell(self, number, step)

    monkeypatch.setattr(FinishedSteps, "finish_if_whole", deaf_at_the_end)
    with LocalJob(job) as run:
        run.start_hosts("ab")

        def all_there(status: dict[str, Any]) -> bool:
            there = run.coordinator.run.inventory.newest_complete({"a", "b"})
            return there is not None and there.step == 30

        run.wait(all_there)
        os.kill(run.trainer_pids()[0], signal.SIGKILL)
        assert run.finish()["state"] == "finished"
    assert_recovered(run.lines, reference, ["start"])
    events = [line["event"] for line in run.lines("ledger") if line["event"] != "time_account"]
    assert events[-2:] == ["checkpoint_committed", "job_finished"]


def test_killed_host_is_left_out(corpus: Path, reference: Lines, tmp_path: Path) -> None:  # OP-09
    with LocalJob(make_job(corpus, tmp_path, "host", "parallel.pp=1", "failure.max_errors=1")) as run:  # FA-02 (a)
        run.start_hosts("aabb")
        before = run.wait_step(5)
        run.kill_host("b3")
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "host_lost"])
        last = formed(run)[-1]
        assert last["layout"] == "dp_shard3"
        assert last["step"] >= before["step"]


def test_killed_node_is_replaced_when_it_comes_back(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with LocalJob(make_job(corpus, tmp_path, "node", *PP2_DP2)) as run:
        run.start_hosts("aabb")
        before = run.wait_step(5)
        survivors = {h["pid"] for h in before["hosts"] if h["node"] == "a"}
        run.kill_host("b2")
        run.kill_host("b3")
        after = run.wait(lambda status: status["state"] == "running" and status["layout"] == "pp2")
        assert {h["pid"] for h in after["hosts"]} == survivors
        paused = run.trainer_pids()[0]
        os.kill(paused, signal.SIGSTOP)  # the few steps of this job would be over before the newcomers are ready
        for name in ("c4", "c5"):
            run.start_host(name, "c")
        run.wait(lambda status: status["spares"] == 2)
        os.kill(paused, signal.SIGCONT)
        run.wait(lambda status: status["generation"] == 3)
        assert run.finish()["state"] == "finished"
        assert_recovered(run.lines, reference, ["start", "host_lost", "growth"])
        generations = formed(run)
        assert [g["layout"] for g in generations] == ["pp2 x dp_shard2", "pp2", "pp2 x dp_shard2"]
        assert generations[1]["step"] >= before["step"]
        assert generations[2]["restored_bytes"].keys() <= {"image", "remote"}  # the newcomers' node has copies by now


def test_a_job_whose_every_step_is_bad_ends(corpus: Path, tmp_path: Path) -> None:  # NU-06
    huge = ("optimizer={learning_rate: 1e30, weight_decay: 0}", "schedule.warmup_steps=0")
    with LocalJob(make_job(corpus, tmp_path, "nan", *huge, "hosts.max=2")) as run:
        run.start_hosts("ab")
        status = run.finish()
        assert status["state"] == "failed"
        assert "4 of the last 64 steps were bad and left out" in status["message"]
        actions = [(e["step"], e["action"]) for e in run.lines("ledger") if e["event"] == "bad_step"]
        assert actions == [(2, "roll_back"), (2, "skip"), (3, "skip"), (4, "skip"), (5, "skip")]


def test_row_that_cannot_be_read_is_tried_again_and_then_ends_the_job_with_rank_step_and_traceback(
    corpus: Path, reference: Lines, tmp_path: Path
) -> None:  # FA-02 (b), FA-08
    """The second half of a row is a record batch, which no other row needs; one of its bits is flipped. Of the first
    such row it is flipped back as soon as a trainer has raised an exception."""
    prepare(open_corpus(str(corpus.parent / "texts")), str(tmp_path / "data"), VOCABULARY, batch_tokens=16)
    job = make_job(tmp_path / "data", tmp_path, "row", "hosts.max=2", "parallel.pp=1")
    data = open_training(job)
    passing, batch = (2 * data.batches.sample_ids(step)[5] + 1 for step in (3, 6))  # of rank 1 of 2
    (shard,) = data.datasets[0].manifest.shards

    def flip_a_bit_of(number: int) -> None:
        with (tmp_path / "data" / shard.path).open("r+b") as file:
            file.seek(sum(shard.batches[number]) - 1)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    for number in (passing, batch):
        flip_a_bit_of(number)
    with LocalJob(job) as run:
        run.start_hosts("ab")
        run.wait(lambda status: bool(run.told("trouble")))
        flip_a_bit_of(passing)
        status = run.finish()
        assert status["state"] == "failed"
        assert "rank 1, step 6" in status["message"] and "3 times in a row" in status["message"]
        assert f"{shard.path} is damaged: batch {batch} (bytes {shard.batches[batch][0]} to " in status["message"]
        assert "DataError" in status["traceback"]
        assert_recovered(run.lines, reference[:5], ["start", "exception"])
        troubles = [e for e in run.lines("ledger") if e["event"] == "trouble"]
        assert {e["cause"] for e in troubles} == {"exception"}
        assert f"batch {passing} " in troubles[0]["detail"]
        assert [f"batch {batch} " in e["detail"] for e in troubles[-4:]] == [False, True, True, True]


def test_fewer_hosts_than_the_job_needs_wait_for_more(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    with LocalJob(make_job(corpus, tmp_path, "few", *PP2_DP2, "hosts.max=2")) as run:
        run.start_hosts("ab")
        run.wait_step(5)
        run.kill_host("b1")
        status = run.wait(lambda status: status["state"] == "waiting")
        assert "hosts.min=2" in status["message"]
        run.start_host("c2", "c")
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), reference)


@pytest.mark.parametrize("hosts", ["a", "abc"])
def test_total_loss_resumes_from_the_last_checkpoint_on_other_hosts(
    corpus: Path, reference: Lines, tmp_path: Path, hosts: str
) -> None:  # OP-01, FA-09
    job = make_job(corpus, tmp_path, "total", "parallel.pp=1", "hosts.max=2")
    with LocalJob(job) as first:
        first.start_hosts("ab")
        first.wait_step(13)
        first.kill_host("a0")
        first.kill_host("b1")
    other = make_job(corpus, tmp_path, "total", "parallel.pp=1", f"hosts.max={len(hosts)}")
    with LocalJob(other, "run1") as second:
        second.start_hosts(hosts)
        assert second.finish()["state"] == "finished"
        assert_recovered(second.lines, reference, ["start", "start"])
        resumed = [e for e in second.lines("ledger") if e["event"] == "resumed"]
        assert [e["step"] for e in resumed] == [10]
        assert set(formed(second)[-1]["restored_bytes"]) == {"object"}
        generations = [line["generation"] for line in second.lines("journal") if "generation" in line]
        assert generations == sorted(set(generations))


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_checkpoint_is_refused_by_name_and_the_previous_one_used(
    corpus: Path, reference: Lines, tmp_path: Path, damage: str
) -> None:  # FA-10
    job = make_job(corpus, tmp_path, "damaged", "parallel.pp=1", "hosts.max=2")
    with LocalJob(job) as first:
        first.start_hosts("ab")
        first.wait(lambda status: any(e.get("step") == 20 for e in committed(first)))
    damaged = sorted((tmp_path / "damaged" / "checkpoints").glob("step-00000020-g*/*.bin"))[0]
    content = bytearray(damaged.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    damaged.write_bytes(content if damage == "flip" else content[:-1])
    with LocalJob(job, "run1") as second:
        second.start_hosts("ab")
        assert second.finish()["state"] == "finished"
        assert_same_curve(second.lines("steps"), reference)
        refused = [e["detail"] for e in second.lines("ledger") if e["event"] == "checkpoint_refused"]
        assert any(damaged.name in sentence and "step-00000020" in sentence for sentence in refused), refused
        assert min(g["step"] for g in formed(second)[1:]) == 10


def test_state_that_the_job_has_no_use_for_ends_it_with_a_list(corpus: Path, tmp_path: Path) -> None:
    """Momentum was switched off between two submissions: its buffers must not be dropped in silence."""
    sgd = "optimizer={name: sgd, momentum: 0.9, learning_rate: 0.01}", "hosts.max=2"
    with LocalJob(make_job(corpus, tmp_path, "extra", "parallel.pp=1", *sgd)) as first:
        first.start_hosts("ab")
        first.wait(lambda status: bool(committed(first)))
    plain = "optimizer={name: sgd, momentum: 0.0, learning_rate: 0.01}", "hosts.max=2"
    with LocalJob(make_job(corpus, tmp_path, "extra", "parallel.pp=1", *plain), "run1") as second:
        second.start_hosts("ab")
        status = second.finish()
        assert status["state"] == "failed"
        assert "the saved state does not fit this job" in status["message"]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert f"momentum_buffer.{name} is in the saved state but not in this job" in status["message"]


def committed(run: LocalJob) -> Lines:
    return [event for event in run.events if event["event"] == "checkpoint_committed"]


def test_stop_writes_a_last_checkpoint_and_leaves_nothing(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, "stopped", "hosts.max=2")
    with LocalJob(job) as run:
        run.start_hosts("ab")
        status = run.wait_step(5)
        pids = [*run.trainer_pids(), *(h["pid"] for h in status["hosts"])]
        run.stop()
        stopped = run.finish()
        assert stopped["state"] == "killed"
        assert_nothing_left(run, pids)
    with LocalJob(make_job(corpus, tmp_path, "stopped", "hosts.max=1"), "run1") as again:
        again.start_hosts("a")
        assert again.finish()["state"] == "finished"
        assert [e["step"] for e in again.lines("ledger") if e["event"] == "resumed"] == [stopped["step"]]
        assert_same_curve(again.lines("steps"), reference)


def test_finished_job_is_not_run_again(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    job = make_job(corpus, tmp_path, "again", "hosts.max=1")
    for run_id in ("run0", "run1"):
        with LocalJob(job, run_id) as run:
            if run_id == "run0":
                run.start_host("only", "a")
            assert run.finish()["state"] == "finished"
            assert_same_curve(run.lines("steps"), reference)
