"""What every failure must leave in the logs of a job: each step once and as in peace, and the cost of each recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.jobs import assert_same_curve

Lines = list[dict[str, Any]]

PARTS = ("detection", "teardown", "form", "restore", "first_step")


def assert_recovered(
    logs: Callable[[str], Lines], peace: Lines, causes: list[str] | set[str], tolerance: float = 1e-5
) -> None:
    """Samples, loss curve and recoveries of a job, of all of its runs together.

    Args:
        logs: the lines of "steps" or "ledger".
        peace: the lines of the same steps in a run that nothing happened to.
        causes: of the generations that came to a step, in order, or as a set where chance decides how many there are;
            ``["start"]`` says that nothing had to recover.
        tolerance: of loss and gradient norm, relative.
    """
    assert_same_curve(logs("steps"), peace, tolerance)
    found = recoveries(logs("ledger"))
    assert type(causes)(found) == causes, found


def recoveries(ledger: Lines) -> list[str]:
    """Causes of the generations that came to a step, in order; fails if one does not say what it took, part by part."""
    formed = [event for event in ledger if event["event"] == "generation_formed"]
    for event in formed:
        assert event["detail"] or event["cause"] == "start", event
        seconds = [event[f"{part}_seconds"] for part in PARTS]
        assert all(isinstance(part, float) and part >= 0 for part in seconds), event
        assert 0 < event["recovery_seconds"] == pytest.approx(sum(seconds), abs=1e-3), event
    return [event["cause"] for event in formed]
