"""Steps whose loss is not finite, or a spike: real runs whose weights have a NaN that one step needs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from elastic_train.config.job import Job
from elastic_train.config.operation import FailureConfig
from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.step_history import StepHistory
from elastic_train.controller.trouble import Trouble
from elastic_train.data.batches import StepBatches
from elastic_train.data.dataset import TokenDataset
from elastic_train.data.order import SampleOrder
from elastic_train.training.step_judge import StepJudge
from tests.hf_folders import write_hf
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.memory_fault import break_weight
from tests.recovered import assert_recovered, recoveries

Lines = list[dict[str, Any]]


def line(step: int, bad: bool = False) -> dict[str, Any]:
    values: dict[str, Any] = {"step": step, "loss": 2.0 * step, "grad_norm": float(step)}
    return values | ({"skipped": True, "detail": "loss is nan", "loss": None} if bad else {})


def test_history_is_of_good_steps_and_goes_back_with_the_job() -> None:
    history = StepHistory()
    for step in range(1, 9):
        history.append(line(step, bad=step in (3, 7)))
    assert history.good(4) == {"losses": [8.0, 10.0, 12.0, 16.0], "norms": [4.0, 5.0, 6.0, 8.0]}
    assert history.bad_among(2) == 1 and history.bad_among(6) == 2
    history.drop_after(4)
    assert history.good(9) == {"losses": [2.0, 4.0, 8.0], "norms": [1.0, 2.0, 4.0]}
    history.append(line(5))
    assert history.good(1)["losses"] == [10.0]


def test_a_step_is_tried_once_more_and_one_that_follows_a_bad_one_is_not() -> None:
    told: list[dict[str, Any]] = []
    history = StepHistory()
    steps = BadSteps(FailureConfig(max_bad_steps=2), history, lambda event, **fields: told.append(fields))
    for _ in range(2):  # two ranks say it
        trouble = Trouble("bad_step", "rank 0, step 5: loss is nan")
        steps.refused(5, trouble)
    assert not trouble.ends and [fields["action"] for fields in told] == ["roll_back"]
    assert steps.assignment()["no_retry"] == [5]
    assert steps.step_finished(line(4)) is None
    assert steps.assignment()["no_retry"] == [5]
    for step in (5, 6, 7):
        history.append(line(step, bad=True))
        reason = steps.step_finished(line(step, bad=True))
        assert steps.assignment()["no_retry"] == [step + 1]
    assert reason is not None and "3 of the last 64 steps" in reason and "failure.max_bad_steps=2" in reason


def test_the_policy_end_ends() -> None:
    trouble = Trouble("bad_step", "step 5: loss is nan")
    BadSteps(FailureConfig(bad_step="end"), StepHistory(), lambda event, **fields: None).refused(5, trouble)
    assert trouble.ends


# -- real jobs -------------------------------------------------------------------------------------------------------


def rare_token(job: Job) -> tuple[int, int]:
    """An input token that occurs in the samples of just one step of the job's middle, and that step."""
    dataset = TokenDataset.open(job.data.uri, job.data.sequence_length, job.storage)
    batches = StepBatches(dataset, SampleOrder(len(dataset), job.seed), job.training)
    steps = {
        step: {int(token) for slot in range(job.training.slots) for token in batches.slot(step, slot)[0].flat}
        for step in range(1, job.training.steps + 1)
    }
    counts = Counter(token for tokens in steps.values() for token in tokens)
    return next(
        (token, step) for step in range(3, job.training.steps - 3) for token in steps[step] if counts[token] == 1
    )


def weights_with_nan(folder: Path, job: Job, token: int) -> Path:
    """A Hugging Face folder with random weights; the embedding of ``token`` is NaN."""

    def spoil(name: str, values: npt.NDArray[np.float32]) -> None:
        if name == "model.embed_tokens.weight":
            values[token] = np.nan

    return write_hf(folder, job.model, change=spoil)


def run(job: Job, run_id: str, hosts: str) -> LocalJob:
    """Run to the end."""
    with LocalJob(job, run_id) as local:
        local.start_hosts(hosts)
        local.finish()
    return local


def bad_steps(local: LocalJob) -> list[tuple[int, str]]:
    return [(event["step"], event["action"]) for event in local.lines("ledger") if event["event"] == "bad_step"]


@pytest.mark.slow
def test_one_bad_step_under_each_policy(corpus: Path, tmp_path: Path) -> None:
    """Ended there; resubmitted it is left out. Tried again first, the job comes to the same curve."""
    plain = make_job(corpus, tmp_path, "plain", "training.steps=14")
    token, step = rare_token(plain)
    source = weights_with_nan(tmp_path / "source", plain, token)
    samples = len(TokenDataset.open(str(corpus), plain.data.sequence_length, plain.storage))  # the token is in one

    def job(name: str, policy: str, *more: str) -> Job:
        fixed = (f"init_from={source}", "training.steps=14", "training.ema_decay=0.9", "hosts.max=2", "parallel.pp=1")
        fixed += (f"evaluation.uri={corpus}", f"evaluation.every_steps={step}", f"evaluation.samples={samples}")
        return make_job(corpus, tmp_path, name, *fixed, f"failure.bad_step={policy}", *more)

    ended = run(job("skip", "end", "hosts.max=1"), "run0", "a")
    assert ended.coordinator.state == "failed"
    assert f"step {step}: loss is nan" in ended.coordinator.message
    assert [entry["step"] for entry in ended.lines("steps")] == list(range(1, step))
    skipped = run(job("skip", "skip", "hosts.max=1"), "run1", "a")
    assert skipped.coordinator.state == "finished"
    assert bad_steps(skipped) == [(step, "end"), (step, "skip")]
    (*_, account) = (event for event in skipped.lines("ledger") if event["event"] == "time_account")
    assert account["seconds"]["skipped"] > 0
    assert sum(account["seconds"].values()) == pytest.approx(account["host_seconds"])
    text = (tmp_path / "skip" / "steps.jsonl").read_text()
    lines = [json.loads(entry, parse_constant=pytest.fail) for entry in text.splitlines()]
    assert [entry["step"] for entry in lines if entry.get("skipped")] == [step]
    assert lines[step - 1]["loss"] is None and lines[step - 1]["grad_norm"] is None and lines[step - 1]["samples"]
    assert lines[step - 1]["eval_loss"] is None and lines[step - 1]["eval_loss_ema"] is None
    assert all(math.isfinite(entry["loss"]) for entry in lines if entry["step"] != step)

    again = run(job("back", "roll_back"), "run0", "ab")
    assert again.coordinator.state == "finished"
    assert bad_steps(again) == [(step, "roll_back"), (step, "skip")]
    assert recoveries(again.lines("ledger")) == ["start", "bad_step"]
    good, others = [[entry for entry in local.lines("steps") if entry["step"] != step] for local in (skipped, again)]
    assert_same_curve(others, good)


@pytest.mark.slow
def test_faults_that_pass_cost_no_step(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    """A weight in the memory of one trainer becomes NaN, later another one huge: the loss is a spike. Both times the
    step is computed again from the snapshot, and is good."""
    spikes = ("failure.loss_spike_factor=3", "failure.bad_step_window=4")
    job = make_job(corpus, tmp_path, "fault", "hosts.max=2", "parallel.pp=1", *spikes)
    beats = 2 * job.model.num_hidden_layers * job.training.slots // 2  # forward and backward, half of the slots
    with LocalJob(job) as local:
        local.start_hosts("ab")
        for generation, step, weight, value in (
            (1, 2, "model.layers.3.self_attn.q_proj.weight", math.nan),
            (2, 8, "lm_head.weight", 1e5),
        ):
            status = local.wait(lambda now, at=(generation, step): now["generation"] == at[0] and now["step"] >= at[1])
            (host,) = (host for host in status["hosts"] if host["rank"] == 1)
            break_weight(host["trainer_pid"], Path(host["pool"]), 1, f"param.{weight}", beats, value)
        assert local.finish()["state"] == "finished"
    assert_recovered(local.lines, reference, ["start", "bad_step", "bad_step"])
    assert [action for _, action in bad_steps(local)] == ["roll_back", "roll_back"]
    nan, spike = local.told("trouble")
    assert "loss is nan" in nan["detail"]
    assert re.search(r"loss \S+ is above 3 x \S+, the median of 4", spike["detail"])
    assert not local.told("rolled_back")


@pytest.mark.slow
def test_spikes_are_the_same_whoever_judges(corpus: Path, tmp_path: Path) -> None:
    """A trainer is killed after some spikes; each line agrees with a judge that has seen them all."""
    spiky = ("failure.bad_step=skip", "failure.norm_spike_factor=1.1", "failure.bad_step_window=4")
    job = make_job(corpus, tmp_path, "spikes", *spiky, "failure.max_bad_steps=4", "hosts.max=2", "parallel.pp=1")
    with LocalJob(job) as local:
        local.start_hosts("ab")
        local.wait_step(12)
        local.kill_host("b1")
        assert local.finish()["state"] == "finished"
    lines = local.lines("steps")
    judge = StepJudge(4, None, 1.1)
    verdicts = [judge.judge(entry["loss"], entry["grad_norm"]) for entry in lines]
    assert [verdict is not None for verdict in verdicts] == [bool(entry.get("skipped")) for entry in lines]
    late = [entry["step"] for entry in lines if entry.get("skipped") and entry["generation"] == 2]
    assert late and len({entry["layout"] for entry in lines}) == 2
    assert [entry["step"] for entry in lines] == list(range(1, 31))
    assert bad_steps(local) == [(entry["step"], "skip") for entry in lines if entry.get("skipped")]
