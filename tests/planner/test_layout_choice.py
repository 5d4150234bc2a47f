"""The planner, as it is, against what was measured of every layout of 8 CPU ranks: ``benchmarks/layout_choice.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import layout_choice
from benchmarks.layout_choice import Measured, Step, verdict

STORED = Path(layout_choice.__file__).parent / "measured" / "choice.json"


@pytest.fixture(scope="module")
def stored() -> Measured:
    return layout_choice.read(STORED)


def test_what_is_chosen_is_within_5_percent_of_the_fastest(stored: Measured) -> None:
    """Of all layouts, each with its fastest options. What was not measured cannot be judged: run it again."""
    said = verdict(stored)
    assert said.loss is not None, f"{said.chosen.name} was not measured"
    assert said.loss <= 0.05


def test_what_a_choice_loses_is_told(stored: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    name = verdict(stored).chosen.name
    steps = {row.name: [Step(1.0, 1.0)] if row.name == name else [Step(2.0, 2.0)] for row in stored.rows}
    rows = [replace(row, steps=steps[row.name]) for row in stored.rows]
    assert layout_choice.judge(replace(stored, rows=rows)) == 0
    printed = capsys.readouterr().out
    assert f"| {name} **chosen** | 1.000 | 1.000 |" in printed and f"| 0.0 % slower | {len(rows)} |" in printed
    rows[-1] = replace(rows[-1], steps=[Step(0.8, 1.0), Step(0.1, 1.0), Step(9.0, 9.0)])  # the median counts
    assert verdict(replace(stored, rows=rows)).loss == pytest.approx(0.25)
    assert layout_choice.judge(replace(stored, rows=[row for row in rows if row.name != name])) == 1
    assert f"chosen, but not measured: {name}; run choice again" in capsys.readouterr().out


def test_every_size_of_every_axis_is_run_once(stored: Measured) -> None:
    """Also numbers of data ranks that no search looks at: 5 and 6 take as many micro-batches as 4 and 7."""
    job = layout_choice.quickstart_job()
    rows = layout_choice.rows_of(job, layout_choice.known_by(job, stored.calibration))
    assert len({row.name for row in rows}) == len(rows)
    alone = {row.layout.data_ranks for row in rows if row.layout.tp == row.layout.pp == row.layout.cp == 1}
    assert alone == set(range(1, 9))
    assert all(row.layout.world_size <= layout_choice.RANKS for row in rows)


def test_measured_steps_are_kept(stored: Measured, tmp_path: Path) -> None:
    layout_choice.write(stored, tmp_path / "kept.json")
    assert layout_choice.read(tmp_path / "kept.json") == stored
