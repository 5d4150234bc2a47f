from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.operation import CheckpointConfig
from elastic_train.controller.save_schedule import SaveSchedule


def schedule(**values: object) -> SaveSchedule:
    return SaveSchedule(CheckpointConfig.model_validate(values))


def due(saves: SaveSchedule, steps: range) -> list[int]:
    """The steps that are saved when every save is over at once."""
    found = []
    for step in steps:
        if saves.due(step):
            saves.begun(step)
            found.append(step)
    return found


def test_a_fixed_interval_falls_on_its_multiples_wherever_the_job_begins() -> None:
    saves = schedule(every_steps=10)
    saves.start(13)
    assert due(saves, range(14, 45)) == [20, 30, 40]


def test_a_tuned_one_is_counted_from_the_last_save() -> None:
    saves = schedule(every_steps=10, interval="tuned")
    saves.start(13)
    assert due(saves, range(14, 45)) == [23, 33, 43]
    saves.go_back(37)
    assert due(saves, range(38, 60)) == [47, 57]


def test_a_skipped_save_is_told_once_and_made_as_soon_as_it_can() -> None:
    saves = schedule(every_steps=10)
    assert due(saves, range(1, 11)) == [10]
    told = [step for step in range(11, 34) if saves.due(step) and saves.skipped(step)]
    assert told == [20, 30]
    assert due(saves, range(34, 45)) == [34, 40]
    tuned = schedule(every_steps=10, interval="tuned")
    assert [step for step in range(1, 34) if tuned.due(step) and tuned.skipped(step)] == [10]
    assert due(tuned, range(34, 45)) == [34, 44]


def test_a_failed_save_is_tried_again_at_once_then_less_and_less_often() -> None:
    saves = schedule(every_steps=100)
    tried = []
    for step in range(100, 200):
        if saves.due(step):
            saves.begun(step)
            tried.append(step)
            saves.failed(step)
    assert tried == [100, 101, 103, 107, 115, 131, 163]
    saves.begun(200)
    saves.committed(1.0)
    saves.begun(300)
    saves.failed(302)  # two steps went on meanwhile
    assert due(saves, range(303, 320)) == [303]


def test_going_back_brings_a_retry_back_too() -> None:
    saves = schedule(every_steps=100)
    saves.begun(100)
    for _ in range(5):
        saves.failed(150)
    saves.go_back(90)
    assert due(saves, range(91, 100)) == [91]


def test_a_tuned_interval_follows_what_is_measured_within_its_bounds() -> None:
    saves = schedule(every_steps=10, interval="tuned", min_steps=5, max_steps=40)

    def save(during: float, rest: float = 1.0) -> dict[str, Any] | None:
        """A save that goes on until the middle of the second step after it began."""
        saves.begun(0)
        assert saves.step(during, saving=True) is None
        saves.committed(2.0)
        return saves.step(rest, saving=False)

    for _ in range(10):
        assert saves.step(1.0, saving=False) is None
    change = save(1.3, 1.2)  # a save costs half a second, and failures are rare: seldom is enough
    assert change is not None
    assert change["cost_seconds"] == pytest.approx(0.5)
    assert (change["steps"], change["before"], change["step_seconds"], change["save_seconds"]) == (40, 10, 1.0, 2.0)
    assert saves.interval == 40
    for _ in range(10**6):  # a failure every microsecond or so
        saves.trouble()
    change = save(1.5)
    assert change is not None
    assert (change["steps"], change["before"]) == (5, 40)
    assert change["mtbf_seconds"] < 1.0
    assert save(1.5) is None  # as it should be


def test_what_failed_saves_and_other_layouts_cost_is_not_counted() -> None:
    saves = schedule(every_steps=10, interval="tuned", min_steps=1, max_steps=10_000)
    for _ in range(4):
        saves.step(1.0, saving=False)
    saves.begun(0)
    saves.step(50.0, saving=True)
    saves.failed(1)
    assert saves.step(50.0, saving=False) is None
    saves.new_layout()
    for _ in range(4):
        saves.step(3.0, saving=False)
    saves.begun(5)
    saves.committed(0.5)
    change = saves.step(4.0, saving=False)  # the save was over before the step was
    assert change is not None
    assert (change["cost_seconds"], change["step_seconds"]) == (1.0, 3.0)


def test_a_fixed_interval_is_never_changed() -> None:
    saves = schedule(every_steps=10)
    saves.step(1.0, saving=False)
    saves.begun(10)
    saves.committed(100.0)
    assert saves.step(9.0, saving=False) is None
    assert saves.interval == 10
