"""A snapshot is copied beside the next step's forward and backward pass: nothing may change the state meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.layout import Layout
from tests.ranks import run_ranks
from tests.training.optimizer_runs import changes_outside_updates
from tests.training.synthetic import small_job

EVALUATED = {"evaluation": {"uri": "memory", "every_steps": 1, "samples": 4}, "training": {"ema_decay": 0.9}}


@pytest.mark.parametrize(
    ("sections", "layout"),
    [
        ({}, Layout()),
        (EVALUATED, Layout()),
        (EVALUATED, Layout(pp=2)),
        (EVALUATED, Layout(dp_shard=2)),
        (EVALUATED | {"parallel": {"data": "zero1"}}, Layout(dp_shard=2)),
        ({"parallel": {"data": "zero2"}}, Layout(dp_shard=2)),
        ({"parallel": {"data": "ddp"}, "training": {"precision": "bf16"}}, Layout(dp_replicate=2)),
        ({"parallel": {"data": "hsdp", "reshard_after_forward": True}}, Layout(dp_replicate=2, dp_shard=2)),
        ({"training": {"determinism": "exact"}}, Layout(dp_shard=2)),
        ({"optimizer": {"name": "muon"}}, Layout(dp_shard=2)),
    ],
)
def test_only_an_update_changes_the_state(sections: dict[str, Any], layout: Layout) -> None:
    assert run_ranks(changes_outside_updates, layout.world_size, small_job(**sections), layout, 2) == (
        [[]] * layout.world_size
    )
