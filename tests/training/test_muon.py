from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config.layout import Layout
from elastic_train.training.optimizers.muon import orthogonalise
from tests.ranks import run_ranks
from tests.training.optimizer_runs import job_with_optimizer, muon_beside_torch
from tests.training.runs import late_imports, run

ODD = {
    "model": {
        "hidden_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 111,
        "vocab_size": 103,
    },
    "data": {"sequence_length": 33},
}
"""Sizes that divide nothing but the three tensor ranks."""


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (48, 48)], ids=str)
def test_orthogonal_directions_keep_their_vectors(shape: tuple[int, int]) -> None:
    """Same singular vectors, singular values near 1 (five steps of Newton-Schulz leave them between 0.7 and 1.2)."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonalise(matrix) @ v.T
    assert inner.diagonal().min() > 0.65 and inner.diagonal().max() < 1.25
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-3
    assert not orthogonalise(torch.zeros(shape)).any()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_equals_torch_muon_and_adamw(precision: str) -> None:
    """Six steps on one rank beside ``torch.optim.Muon`` (which works in bfloat16) and ``torch.optim.AdamW``; before the
    fourth our optimizer is made anew and its state written into it.
    """
    (differences,) = run_ranks(muon_beside_torch, 1, job_with_optimizer("muon", training={"precision": precision}))
    # In float32 ours is the more exact one: torch's differs by the rounding of its bfloat16.
    for name, (difference, moved) in differences.items():
        assert moved > 1e-4, name
        assert difference <= (1e-6 if precision == "bf16" or "layers" not in name else 0.05 * moved), name


def test_state_has_one_tensor_per_matrix_of_a_block() -> None:
    job = job_with_optimizer("muon")
    state = run(job, Layout(), 1).after
    matrices = {key for key in state if ".layers." in key and "norm" not in key}
    assert {key.partition(".")[0] for key in matrices} == {"param", "momentum_buffer"}
    assert {key.partition(".")[0] for key in state.keys() - matrices} == {"param", "exp_avg", "exp_avg_sq"}
    assert len(state) == 2 * 4 * 7 + 3 * (4 * 2 + 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ("even", Layout(dp_replicate=2)),
        ("even", Layout(dp_shard=3)),
        ("even", Layout(pp=2, dp_shard=2)),
        ("even", Layout(dp_shard=2, tp=2)),
        ("even", Layout(dp_replicate=2, dp_shard=2, tp=2)),
        ("odd", Layout(dp_shard=4)),
        ("odd", Layout(dp_shard=2, tp=3)),
    ],
    ids=str,
)
def test_every_layout_takes_the_same_steps(sizes: str, layout: Layout) -> None:
    """Replicas stay bitwise equal (``run`` checks it); the rate is large enough for the losses to move."""
    sections: dict[str, Any] = ODD if sizes == "odd" else {}
    job = job_with_optimizer("muon", {"learning_rate": 5e-3}, training={"micro_batch": 2}, **sections)
    expected, actual = (run(job, at, 4, masked=0.6) for at in (Layout(), layout))
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-4)
    for key, value in expected.after.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(actual.after[key], value, rtol=0, atol=1e-3 * scale, err_msg=key)


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon"])
def test_the_first_step_imports_nothing_heavy(name: str) -> None:
    """What it imports is paid after every failure. torch's profiler probe is one small file."""
    for modules in run_ranks(late_imports, 2, job_with_optimizer(name), Layout(dp_shard=2)):
        assert set(modules) <= {"torch.profiler._cupti_monitor"}


def test_a_run_continues_on_another_layout() -> None:
    job = job_with_optimizer("muon", training={"micro_batch": 2})
    whole = run(job, Layout(), 4)
    start = run(job, Layout(dp_shard=2), 2)
    rest = run(job, Layout(tp=2), 4, first=3, state=start.after)
    np.testing.assert_allclose(rest.losses, whole.losses[2:], rtol=1e-5)
