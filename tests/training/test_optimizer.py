from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.optimizer import OptimizerConfig
from elastic_train.training.optimizers.adam import LocalAdam
from elastic_train.training.optimizers.groups import decays, group
from elastic_train.training.optimizers.lion import LocalLion
from elastic_train.training.optimizers.sgd import LocalSGD
from tests.ranks import run_ranks
from tests.training.optimizer_runs import job_with_optimizer, norms_with_a_spike
from tests.training.runs import assemble, run

MATRIX, NORM, EMPTY = "model.layers.0.q_proj.weight", "model.norm.weight", "model.layers.0.o_proj.weight"


@pytest.mark.parametrize(
    ("name", "dimensions", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("model.layers.0.self_attn.q_proj.bias", 1, False),
        ("lm_head.weight", 2, True),
        ("model.embed_tokens.weight", 2, False),
        ("model.norm.weight", 1, False),
        ("model.layers.7.input_layernorm.weight", 1, False),
    ],
)
def test_decay_groups(name: str, dimensions: int, expected: bool) -> None:
    assert decays(name, dimensions) is expected


def test_parameters_are_updated_block_by_block() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.a.weight", "model.layers.0.n.weight", EMPTY]
    names += ["model.layers.10.a.weight", "model.layers.1.a.weight", "lm_head.weight", NORM]
    sizes = {"n": (3,), "norm": (3,), "o_proj": (0, 3)}
    parameters = {name: torch.ones(sizes.get(name.split(".")[-2], (2, 3))) for name in names}
    assert [(made.names, made.weight_decay) for made in group(parameters, names, 0.1)] == [
        (["model.embed_tokens.weight", NORM], 0.0),
        (["model.layers.0.a.weight"], 0.1),
        (["model.layers.0.n.weight"], 0.0),
        (["model.layers.10.a.weight"], 0.1),
        (["model.layers.1.a.weight"], 0.1),
        (["lm_head.weight"], 0.1),
    ]


class Lion:
    """Algorithm 2 of arXiv:2302.06675, one parameter at a time."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        self._lr, self._betas = lr, betas
        self._moments = [(group, torch.zeros_like(p), p) for group in groups for p in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        beta1, beta2 = self._betas
        for group_, m, p in self._moments:
            update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
            p.sub_(self._lr * (update + group_["weight_decay"] * p))
            m.copy_(beta2 * m + (1 - beta2) * p.grad)


def adam(decoupled: bool) -> Callable[[dict[str, Tensor], OptimizerConfig], Any]:
    return lambda parameters, config: LocalAdam(parameters, config, decoupled=decoupled)


CASES: dict[str, tuple[Any, Any, dict[str, Any], set[str]]] = {
    "adamw": (adam(True), torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}, {"exp_avg", "exp_avg_sq"}),
    "adam": (adam(False), torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}, {"exp_avg", "exp_avg_sq"}),
    "sgd": (LocalSGD, torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
    "sgd without momentum": (LocalSGD, torch.optim.SGD, {"momentum": 0.0}, set()),
    "lion": (LocalLion, Lion, {"betas": (0.9, 0.99)}, {"exp_avg"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference_also_when_continued(case: str, dtype: torch.dtype) -> None:
    """Six steps; before the fourth the optimizer is made anew and its state written into it, as after a restore."""
    make, reference_of, settings, kinds = CASES[case]
    config = OptimizerConfig(name=case.split()[0], weight_decay=0.1, **settings)
    torch.manual_seed(0)
    ours = {MATRIX: torch.randn(5, 3), NORM: torch.ones(3), EMPTY: torch.empty(0, 3)}
    theirs = {name: nn.Parameter(value.clone()) for name, value in ours.items() if value.numel()}
    groups = [{"params": [theirs[MATRIX]], "weight_decay": 0.1}, {"params": [theirs[NORM]], "weight_decay": 0.0}]
    reference = reference_of(groups, lr=1e-2, **settings)
    optimizer = make(ours, config)
    assert optimizer.state.keys() == kinds
    for step in range(1, 7):
        gradients = {name: torch.randn_like(value).to(dtype) for name, value in ours.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].float()
        reference.step()
        if step == 4:
            saved = {kind: {name: t.clone() for name, t in state.items()} for kind, state in optimizer.state.items()}
            optimizer = make(ours, config)
            for kind, tensors in optimizer.state.items():
                assert tensors.keys() == ours.keys() and not any(tensor.any() for tensor in tensors.values())
                for name, live in tensors.items():
                    live.copy_(saved[kind][name])
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        optimizer.step(gradients, step=step, lr=1e-2)
        assert all(torch.equal(gradients[name], kept[name]) for name in kept), "gradients are read only"
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-6, atol=1e-7)


def test_fp32_weights_keep_small_updates() -> None:
    """NU-01: Weight 1.0, 100 updates of 6e-4 each (a constant gradient makes Adam's update the rate): 0.94."""
    weight = {NORM: torch.ones(4)}
    optimizer = LocalAdam(weight, OptimizerConfig(), decoupled=True)
    for step in range(1, 101):
        optimizer.step({NORM: torch.ones(4)}, step=step, lr=6e-4)
    torch.testing.assert_close(weight[NORM], torch.full((4,), 0.94), rtol=1e-5, atol=0)


def test_weight_decay_in_small_steps_is_not_lost() -> None:
    """NU-02: lr 3e-4, decay 0.1, no gradient, 1000 steps: (1 - 3e-5)^1000."""
    weight = {MATRIX: torch.ones(2, 2)}
    optimizer = LocalAdam(weight, OptimizerConfig(weight_decay=0.1), decoupled=True)
    for step in range(1, 1001):
        optimizer.step({MATRIX: torch.zeros(2, 2)}, step=step, lr=3e-4)
    torch.testing.assert_close(weight[MATRIX], torch.full((2, 2), 0.97045), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("adamw", {"momentum": 0.9}, "momentum is not used by name=adamw, which takes betas, eps, weight_decay"),
        ("sgd", {"eps": 1e-8, "betas": (0.9, 0.99)}, "betas, eps is not used by name=sgd, which takes momentum"),
        ("lion", {"eps": 1e-8}, "eps is not used by name=lion, which takes betas, weight_decay"),
    ],
)
def test_settings_of_another_optimizer_are_refused(name: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        OptimizerConfig(name=name, **settings)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion", "muon"])
def test_a_job_survives_being_written(name: str) -> None:
    job = job_with_optimizer(name)
    assert Job.model_validate(job.as_dict(), strict=False) == job
    assert ("momentum" in job.as_dict()["optimizer"]) == (name in ("sgd", "muon"))


@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_every_layout_takes_the_same_steps(name: str) -> None:
    """Three ranks of unequal share, and both other axes at once, against one rank. Lion's sign may turn where the
    momentum is next to nothing, in few elements.
    """
    job = job_with_optimizer(name, training={"micro_batch": 2})
    expected = run(job, Layout(), 4, masked=0.6)
    assert expected.losses[-1] != expected.losses[0]
    for layout in (Layout(dp_shard=3), Layout(pp=2, tp=2)):
        actual = run(job, layout, 4, masked=0.6)
        np.testing.assert_allclose(actual.losses, expected.losses, rtol=1e-5)
        np.testing.assert_allclose(actual.norms, expected.norms, rtol=1e-5 if name != "lion" else 1e-4)
        assert actual.after.keys() == expected.after.keys()


@pytest.mark.parametrize("name", ["adamw", "muon", "lion"])
def test_without_gradient_only_matrices_decay(name: str) -> None:  # OP-06
    """lr 1e-2, weight decay 0.1, every label masked: matrices x 0.999, norms 1.0, the embedding untouched."""
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1}
    job = job_with_optimizer(name, settings, training={"steps": 10**9}, schedule={"warmup_steps": 0})
    result = run(job, Layout(), 1, empty_rows=tuple(range(8)))
    for key in [key for key in result.before if key.startswith("param.")]:
        before, after = result.before[key], result.after[key]
        if "norm" in key or "embed_tokens" in key:
            np.testing.assert_array_equal(after, before, err_msg=key)
        else:
            np.testing.assert_allclose(after, before * np.float32(0.999), rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(pp=2)], ids=str)
def test_a_gradient_fifty_times_as_large_is_seen_and_clipped(layout: Layout) -> None:  # NU-10
    """SGD without momentum and decay moves the weights by rate x clipped gradient; the norm told is the one before."""
    settings = {"learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1.0}
    job = job_with_optimizer("sgd", settings, schedule={"name": "constant", "warmup_steps": 0, "min_lr": 0.0})
    usual, spiked = (run_ranks(norms_with_a_spike, layout.world_size, job, layout, 3, size) for size in (1.0, 50.0))
    norms, expected = ([step.grad_norm for step in ranks[0][0]] for ranks in (spiked, usual))
    assert norms[:2] == expected[:2]
    assert norms[2] == pytest.approx(50 * expected[2], rel=1e-4) and expected[2] > 1.0
    before, after = (assemble([rank[index] for rank in spiked]) for index in (1, 2))
    moved = sum(float(((after[key] - before[key]).astype(np.float64) ** 2).sum()) for key in before)
    assert math.sqrt(moved) == pytest.approx(0.5 * 1.0, rel=1e-4)


@pytest.mark.parametrize(("name", "layout"), [("sgd", Layout()), ("muon", Layout(dp_shard=2))], ids=str)
def test_one_bad_micro_batch_drops_the_whole_step(name: str, layout: Layout) -> None:  # NU-04, NU-06
    """Token 255 is in one of the eight micro-batches of step 2, and its embedding is NaN: nothing moves on any rank."""
    job = job_with_optimizer(name)
    start = run(job, Layout(), 1).after
    start["param.model.embed_tokens.weight"][255] = np.nan
    bad = {"planted": (2, 6, 255), "below": 255}
    stopped = run(job, layout, 2, first=2, state=start, **bad)
    assert math.isnan(stopped.losses[0])
    for key, value in start.items():
        np.testing.assert_array_equal(stopped.after[key], value, err_msg=key)
    assert all(map(math.isfinite, run(job, layout, 3, first=3, state=stopped.after, **bad).losses))
