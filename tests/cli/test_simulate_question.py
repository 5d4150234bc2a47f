from __future__ import annotations

import statistics

import pytest

from elastic_train.cli.simulate_question import Asked, asked_of
from elastic_train.config.time_causes import Cause


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
