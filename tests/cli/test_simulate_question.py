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
    assert {costs.of(kind, 512, from_storage=True).total for kind in (None, *costs.pauses)} == {pytest.approx(1800.0)}
    outcomes = case.outcomes(False)
    paused = (Cause.DETECTION, Cause.TEARDOWN, Cause.FORM, Cause.RESTORE, Cause.FIRST_STEP)
    spent = statistics.fmean(sum(run.seconds.get(cause, 0.0) for cause in paused) / 512 for run in outcomes)
    # a pause that another failure ends is shorter: 1800 s of 64 nodes are 0.32 failures
    assert 0.7 * 1800 < spent / statistics.fmean(run.interruptions for run in outcomes) < 1800
