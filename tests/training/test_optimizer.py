from __future__ import annotations

import copy

import pytest
import torch

from elastic_train.config.job import OptimizerConfig
from elastic_train.training.optimizer import LocalAdamW, decays

CONFIG = OptimizerConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "dimensions", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("lm_head.weight", 2, True),
        ("model.embed_tokens.weight", 2, False),
        ("model.norm.weight", 1, False),
        ("model.layers.7.input_layernorm.weight", 1, False),
    ],
)
def test_decay_groups(name: str, dimensions: int, expected: bool) -> None:
    assert decays(name, dimensions) is expected


def test_equals_torch_adamw_also_when_continued() -> None:
    torch.manual_seed(0)
    matrix, norm = torch.randn(5, 3), torch.ones(3)
    ours = {"q_proj.weight": matrix.clone(), "model.norm.weight": norm.clone(), "o_proj.weight": torch.empty(0, 3)}
    theirs = [torch.nn.Parameter(matrix.clone()), torch.nn.Parameter(norm.clone())]
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=CONFIG.betas, eps=CONFIG.eps)
    optimizer = LocalAdamW(ours, CONFIG)
    for step in range(1, 7):
        gradients = {name: torch.randn_like(value) for name, value in ours.items()}
        for parameter, name in zip(theirs, ours, strict=False):
            parameter.grad = gradients[name].clone()
        reference.step()
        if step == 4:
            # A restored process: new object, moments written into it, step number from outside.
            moments = copy.deepcopy((optimizer.exp_avg, optimizer.exp_avg_sq))
            optimizer = LocalAdamW(ours, CONFIG)
            for live, saved in zip((optimizer.exp_avg, optimizer.exp_avg_sq), moments, strict=True):
                for name, value in saved.items():
                    live[name].copy_(value)
        optimizer.step(gradients, step=step, lr=1e-2)
    torch.testing.assert_close(ours["q_proj.weight"], theirs[0].detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours["model.norm.weight"], theirs[1].detach(), rtol=1e-6, atol=1e-7)


def test_fp32_weights_keep_small_updates() -> None:
    """Weight 1.0, 100 updates of 6e-4 each (a constant gradient makes Adam's update the rate): 0.94."""
    weight = {"model.norm.weight": torch.ones(4)}
    optimizer = LocalAdamW(weight, CONFIG)
    for step in range(1, 101):
        optimizer.step({"model.norm.weight": torch.ones(4)}, step=step, lr=6e-4)
    torch.testing.assert_close(weight["model.norm.weight"], torch.full((4,), 0.94), rtol=1e-5, atol=0)
