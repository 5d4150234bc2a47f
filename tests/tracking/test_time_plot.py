from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_train.config.time_causes import Cause
from elastic_train.tracking.time_plot import COLORS, MOST_LINES, TimeHistory, pieces, plot_time


def started(at: float) -> dict[str, Any]:
    return {"event": "job_started", "time": at}


def account(at: float, **seconds: float) -> dict[str, Any]:
    return {"event": "time_account", "time": at, "seconds": seconds}


TWO_RUNS = [
    started(100.0),
    account(110.0, start=20.0),
    {"event": "trouble", "time": 120.0},
    account(120.0, start=20.0, useful=20.0),
    account(130.0, start=20.0, useful=18.0, detection=22.0),
    started(200.0),
    account(210.0, useful=8.0),
]


def test_every_cause_has_a_colour_of_its_own() -> None:
    assert set(COLORS) == set(Cause)
    assert len(set(COLORS.values())) == len(COLORS)


def test_what_each_account_adds() -> None:
    lines = [line for line in TWO_RUNS if line["event"] != "trouble"]
    assert pieces(lines) == [
        (100.0, 110.0, {"start": 20.0}),
        (110.0, 120.0, {"start": 0.0, "useful": 20.0}),
        (120.0, 130.0, {"start": 0.0, "useful": -2.0, "detection": 22.0}),
        (200.0, 210.0, {"useful": 8.0}),
    ]


def test_the_picture_has_the_colours_of_the_causes(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    picture = imread(plot_time(TWO_RUNS, tmp_path / "plots" / "time.png", title="run"))[..., :3]

    def share(cause: str) -> float:
        return float((abs(picture - to_rgb(COLORS[cause])).max(axis=2) < 0.01).mean())

    assert share("start") > 0.04
    assert share("useful") > 0.04
    assert share("detection") > 0.04
    assert share("waiting") < 0.001


def test_no_account_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run: no time account to draw"):
        plot_time([started(1.0), account(2.0)], tmp_path / "none.png", title="run")


def test_a_long_history_is_thinned_and_keeps_its_sum() -> None:
    history = TimeHistory()
    history.add(started(0.0))
    for at in range(1, 3 * MOST_LINES):
        history.add(account(float(at), useful=2.0 * at))
    drawn = pieces(history.lines)
    assert len(drawn) <= MOST_LINES
    assert sum(spent["useful"] for *_, spent in drawn) == pytest.approx(2.0 * (3 * MOST_LINES - 1))
    assert drawn[0][0] == 0.0
