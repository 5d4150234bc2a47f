"""Every strategy loses a trainer and then a host, and takes the steps that it would have taken undisturbed.

Shards of weights, moments and averages are cut anew for the hosts that are left, or a stage's peers change. The truth
is one rank without a controller, which every layout equals in float32 (tests/training/test_parity.py).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.controller.elastic_ranks import uninterrupted
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

FP32 = (1e-5, 1e-5)
"""Relative tolerances of loss and gradient norm."""
BF16 = (2e-4, 5e-2)
"""Sums are rounded to bf16 in another order, over 30 steps: 3e-5 and 1.2e-2 between one rank and three."""
MUON = (1e-4, 1e-4)
"""Newton-Schulz and the products before it amplify the last digits."""
EXACT = (0.0, 0.0)
"""Bit for bit."""


def row(name: str, layouts: list[str], tolerance: tuple[float, float], *overrides: str, nodes: str = "aab") -> Any:
    """``nodes``: a letter per host; the last host is lost."""
    return pytest.param(overrides, nodes, layouts, tolerance, id=name)


ROWS = [
    row("ddp", ["dp_replicate3", "dp_replicate2"], FP32, "parallel={data: ddp, dp_replicate: auto}"),
    row("zero1", ["dp_shard4", "dp_shard3"], FP32, "parallel.data=zero1", nodes="aabb"),
    row("zero2-bf16", ["dp_shard3", "dp_shard2"], BF16, "parallel.data=zero2", "training.precision=bf16"),
    row("hsdp", ["dp_replicate2 x dp_shard2", "dp_shard3"], FP32, "parallel.data=hsdp", nodes="aabb"),
    row(
        "interleaved-tied",
        ["pp2 x dp_shard2", "pp2"],
        FP32,
        "parallel.pp=2",
        "parallel.pipeline=interleaved_1f1b",
        "model.tie_word_embeddings=true",
        "hosts.min=2",
        nodes="aabb",
    ),
    row(
        "cp-recompute",
        ["dp_shard2 x cp2", "cp2"],
        FP32,
        "parallel.cp=2",
        "training.recompute=full",
        "hosts.min=2",
        nodes="aabb",
    ),
    row(
        "muon-ema",
        ["dp_shard3", "dp_shard2"],
        MUON,
        "optimizer={name: muon, learning_rate: 1e-3}",
        "training.ema_decay=0.9",
        "parallel.data=zero1",
    ),
    row("exact-zero1", ["dp_shard3", "dp_shard2"], EXACT, "training.determinism=exact", "parallel.data=zero1"),
]


@pytest.mark.parametrize(("overrides", "nodes", "layouts", "tolerance"), ROWS)
def test_a_lost_trainer_and_a_lost_host_change_no_step(
    corpus: Path,
    tmp_path: Path,
    overrides: tuple[str, ...],
    nodes: str,
    layouts: list[str],
    tolerance: tuple[float, float],
) -> None:
    """OP-09: the learning rate of each step too, as hosts are lost during a warm-up of ten steps."""
    job = make_job(
        corpus, tmp_path, "moved", "parallel.pp=1", "schedule.warmup_steps=10", f"hosts.max={len(nodes)}", *overrides
    )
    (expected,) = run_ranks(uninterrupted, 1, job)
    with LocalJob(job) as run:
        for index, node in enumerate(nodes):
            run.start_host(f"{node}{index}", node)
        run.wait_step(3)
        os.kill(run.trainer_pids()[-1], signal.SIGKILL)
        formed_anew = run.wait(lambda status: status["generation"] == 2 and status["state"] == "running")
        run.wait_step(formed_anew["step"] + 1)
        run.kill_host(list(run.hosts)[-1])
        assert run.finish()["state"] == "finished"
        assert_same_curve(run.lines("steps"), expected, *tolerance)
        generations = [event for event in run.lines("ledger") if event["event"] == "generation_formed"]
    assert [event["cause"] for event in generations] == ["start", "trainer_killed", "host_lost"]
    assert [event["layout"] for event in generations] == [layouts[0], *layouts]
    assert all(0 < event["step"] < job.training.steps for event in generations[1:])
    assert "object" not in generations[-1]["restored_bytes"], "the state came from a checkpoint, not from memory"
