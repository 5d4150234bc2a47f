"""Speeds from the log of a run: made by the model itself with known speeds, and by a real run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_train.config.layout import Layout
from elastic_train.config.load import parse_job
from elastic_train.planner.calibration import NothingToLearn, calibrate, layout_of, measured_steps
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.hardware_table import accelerator
from elastic_train.planner.step_time import step_time
from tests.planner.test_search import LLAMA

JOB = parse_job(LLAMA, ["parallel.data=zero3", "training.recompute=full"])
LAYOUTS = [Layout(dp_shard=64), Layout(dp_shard=8, tp=8), Layout(pp=4, dp_shard=4, tp=4)]


def lines(layouts: list[Layout], chip: Accelerator, steps: int = 12) -> list[dict[str, Any]]:
    """A log of a machine that is ``chip``; the first steps of a generation are slow, some steps wait for data."""
    found = []
    for generation, layout in enumerate(layouts, start=1):
        seconds = step_time(JOB, layout, chip).total
        for number in range(steps):
            wait = 0.5 * (number % 2)
            line = {"generation": generation, "layout": str(layout), "data_seconds": wait, "stall_seconds": 0.0}
            found.append(line | {"seconds": seconds + wait + (9 if number < 3 else 0)})
    return found


def machine(efficiency: float, links: float) -> Accelerator:
    known = accelerator("h100-80gb")
    return replace(
        known,
        efficiency=efficiency,
        link_bytes_per_second=known.link_bytes_per_second * links,
        network_bytes_per_second=known.network_bytes_per_second * links,
        link_latency_seconds=known.link_latency_seconds / links,
        network_latency_seconds=known.network_latency_seconds / links,
    )


def test_one_layout_tells_the_efficiency() -> None:
    found = calibrate(JOB, lines(LAYOUTS[:1], machine(0.31, 1.0)), [], accelerator("h100-80gb"))
    assert found.accelerator.efficiency == pytest.approx(0.31, rel=1e-6)
    assert found.link_factor == 1
    assert found.worst < 1e-6


def test_cores_of_half_the_speed_take_twice_as_long_for_what_a_block_costs_anyway() -> None:
    known = accelerator("cpu")
    slow = replace(known, efficiency=known.efficiency / 2, block_seconds=known.block_seconds * 2)
    job = parse_job(LLAMA, ["hosts.device=cpu", "training.precision=fp32", "model.num_hidden_layers=2"])
    seconds = step_time(job, Layout(dp_shard=4), slow).total
    log = [{"generation": 1, "layout": "dp_shard4", "seconds": seconds} for _ in range(6)]
    found = calibrate(job, log, [], known).accelerator
    assert found.efficiency == pytest.approx(slow.efficiency, rel=1e-6)
    assert found.block_seconds == pytest.approx(slow.block_seconds, rel=1e-6)


def test_several_layouts_tell_the_links_as_well() -> None:
    found = calibrate(JOB, lines(LAYOUTS, machine(0.42, 0.25)), [], accelerator("h100-80gb"))
    assert found.accelerator.efficiency == pytest.approx(0.42, rel=0.02)
    assert found.link_factor == pytest.approx(0.25, rel=0.1)
    assert found.worst < 0.01


def test_a_run_that_is_faster_than_compute_allows_has_faster_links() -> None:
    known = accelerator("h100-80gb")
    slow = step_time(JOB, LAYOUTS[1], machine(1.0, 0.01)).total
    found = calibrate(JOB, lines(LAYOUTS[1:2], machine(1.0, 0.05)), [], machine(0.5, 0.01))
    assert found.accelerator.efficiency == 1
    assert found.link_factor > 1
    assert step_time(JOB, LAYOUTS[1], found.accelerator).total < slow
    assert known.efficiency < 1


def test_first_steps_skipped_steps_and_waiting_do_not_count() -> None:
    log = lines(LAYOUTS[:1], machine(0.4, 1.0))
    expected = measured_steps(log)[0].seconds
    log.append(log[-1] | {"seconds": 1e6, "skipped": True})
    assert (
        measured_steps(log)[0].seconds == expected == pytest.approx(step_time(JOB, LAYOUTS[0], machine(0.4, 1.0)).total)
    )


def test_the_last_goodput_of_the_ledger_is_told() -> None:
    ledger = [{"event": "time_account", "goodput": share} for share in (0.5, 0.9)] + [{"event": "job_finished"}]
    assert calibrate(JOB, lines(LAYOUTS[:1], machine(0.4, 1)), ledger, machine(0.4, 1)).goodput == 0.9


def test_a_run_that_is_too_short_teaches_nothing() -> None:
    with pytest.raises(NothingToLearn, match="4 finished steps, and in no layout 3 beyond the first 3"):
        calibrate(JOB, lines(LAYOUTS[:1], machine(0.4, 1), steps=4), [], machine(0.4, 1))


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=6)])
def test_a_layout_is_read_as_it_is_written(layout: Layout) -> None:
    assert layout_of(str(layout)) == layout


def test_text_that_is_no_layout() -> None:
    with pytest.raises(ValueError, match="'dp4' is no layout"):
        layout_of("dp4")
