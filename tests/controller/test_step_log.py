"""What the coordinator knows of the finished steps, and how that goes back with the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.controller.job_folder import JobFolder
from elastic_train.controller.step_log import StepLog
from tests.jobs import make_job


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """With the lines of seven steps."""
    folder = JobFolder(make_job(tmp_path / "no data", tmp_path / "runs", "log"))
    folder.open("digest")
    for step in range(1, 8):
        folder.steps.append({"step": step, "loss": 1.0 / step, "grad_norm": 1.0})
    return folder


@pytest.fixture
def ledger() -> list[str]:
    return []


@pytest.fixture
def log(folder: JobFolder, ledger: list[str]) -> StepLog:
    def record(event: str, **fields: Any) -> None:
        ledger.append(event)

    return StepLog(folder, lambda line: None, record)


def test_the_last_line_is_that_of_the_step_that_was_gone_back_to(log: StepLog) -> None:
    log.go_on()
    assert (log.finished_step, log.last_line["step"]) == (7, 7)
    assert not log.roll_back(7)
    assert log.last_line["step"] == 7
    assert log.roll_back(4)
    assert (log.finished_step, log.last_line) == (4, {"step": 4, "loss": 1 / 4, "grad_norm": 1.0})
    assert log.roll_back(0)
    assert (log.finished_step, log.last_line) == (0, {})


def test_a_later_submission_knows_the_line_of_the_step_it_goes_on_from(log: StepLog) -> None:
    assert log.open(5) == 2
    assert (log.finished_step, log.last_line["step"]) == (5, 5)
    assert log.history.good(1)["losses"] == [1 / 5]


def test_a_line_that_cannot_be_read_is_not_taken_from_a_step_that_is_lost(
    log: StepLog, ledger: list[str], tmp_path: Path
) -> None:
    log.go_on()
    steps = tmp_path / "runs" / "log" / "steps.jsonl"
    steps.unlink()
    steps.mkdir()
    assert log.roll_back(4)
    assert (log.finished_step, log.last_line) == (4, {})
    assert ledger == ["rolled_back", "log_not_rolled_back"]
