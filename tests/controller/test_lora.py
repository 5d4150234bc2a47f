"""A whole job that trains adapters: hosts are lost, it is resubmitted, and another job begins with what it made."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.command import elastic_train
from tests.controller.elastic_ranks import uninterrupted
from tests.hf_folders import write_hf
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.ranks import run_ranks


@pytest.mark.slow
def test_lost_hosts_change_no_step_and_another_job_goes_on_from_the_merged_weights(
    corpus: Path, tmp_path: Path
) -> None:
    plain = make_job(corpus, tmp_path, "plain")
    source = write_hf(tmp_path / "source", plain.model)
    fixed = (
        f"init_from={source}",
        "parallel.pp=1",
        "optimizer.eps=1e-5",
        "training.steps=16",
        "schedule.warmup_steps=0",
    )
    fixed += (f"evaluation.uri={corpus}", "evaluation.every_steps=16", "evaluation.samples=8")
    adapted = make_job(corpus, tmp_path, "adapted", *fixed, "hosts.max=3", "lora.target_modules=all-linear")
    (expected,) = run_ranks(uninterrupted, 1, adapted.model_copy(update={"evaluation": plain.evaluation}))
    with LocalJob(adapted) as run:
        run.start_hosts("aab")
        run.wait_step(3)
        os.kill(run.trainer_pids()[-1], signal.SIGKILL)
        formed_anew = run.wait(lambda status: status["generation"] == 2 and status["state"] == "running")
        run.wait_step(formed_anew["step"] + 1)
        run.kill_host(list(run.hosts)[-1])
        assert run.finish()["state"] == "finished"
        lines = run.lines("steps")
        generations = [event for event in run.lines("ledger") if event["event"] == "generation_formed"]
    assert_same_curve(lines, expected)
    assert [event["layout"] for event in generations] == ["dp_shard3", "dp_shard3", "dp_shard2"]
    assert "object" not in generations[-1]["restored_bytes"], "the state came from a checkpoint, not from memory"

    merged, alone = tmp_path / "merged", tmp_path / "alone"
    for out, options in ((merged, ()), (alone, ("--adapter",))):
        made = elastic_train(
            "export-hf", "adapted@16", "--storage", str(tmp_path), "--out", str(out), *options, cwd=tmp_path
        )
        assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in alone.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    after = make_job(
        corpus, tmp_path, "after", *fixed, f"init_from={merged}", "hosts.max=1", "optimizer.learning_rate=1e-9"
    )
    with LocalJob(after) as run:
        run.start_hosts("a")
        assert run.finish()["state"] == "finished"
        assert run.lines("steps")[-1]["eval_loss"] == pytest.approx(lines[-1]["eval_loss"], rel=1e-5)
