"""Published runs: what the planner says of them. They check time alone: memory, and whether it would fit, is not asked.

The default efficiencies are those of plain PyTorch (torchtitan). Stacks with kernels of their own reach more, and say
how far a fixed share of the peak carries: large models come out within five points; the same share is too much for
small matrices (22B of the Megatron-LM table).
"""

from __future__ import annotations

import pytest

from benchmarks.published_runs import RATES, UTILISATIONS, Rate, Utilisation


@pytest.mark.parametrize("run", RATES, ids=lambda run: run.name)
def test_tokens_per_second(run: Rate) -> None:
    assert run.planned() == pytest.approx(run.published, rel=run.off)


@pytest.mark.parametrize("run", UTILISATIONS, ids=lambda run: run.name)
def test_utilisation(run: Utilisation) -> None:
    assert run.planned() == pytest.approx(run.published, abs=run.off)
