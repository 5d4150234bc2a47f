from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from elastic_train.storage.store import Store
from elastic_train.tracking.plots import EVALUATIONS, plot_job, plot_run, smooth
from tests.tracking.runs import made_up_run

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_job_folder_becomes_a_picture(tmp_path: Path) -> None:
    steps, ledger = made_up_run()
    for name, lines in (("steps.jsonl", steps), ("ledger.jsonl", ledger)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = plot_job(Store.open(str(tmp_path)), tmp_path / "plots" / "loss.png")
    assert out.read_bytes().startswith(PNG)


def test_the_colours_of_generations_are_there(tmp_path: Path) -> None:
    from matplotlib.image import imread

    steps, ledger = made_up_run()
    with_generations = imread(plot_run(steps, ledger, tmp_path / "a.png", title="run"))
    one = [{**line, "generation": 1, "layout": "single"} for line in steps]
    without = imread(plot_run(one, [], tmp_path / "b.png", title="run"))
    assert with_generations.shape == without.shape
    # The band of generation 2 covers some 30 % of the picture.
    assert (abs(with_generations - without).max(axis=2) > 0.02).mean() > 0.25


def test_steps_that_are_not_finite_are_drawn(tmp_path: Path) -> None:
    from matplotlib.image import imread

    steps, ledger = made_up_run()
    steps[3]["loss"] = math.nan
    marked = imread(plot_run(steps, ledger, tmp_path / "nan.png", title="run"))
    plain = imread(plot_run(made_up_run()[0], ledger, tmp_path / "plain.png", title="run"))
    assert (abs(marked - plain).max(axis=2) > 0.02).any()
    alone = plot_run([{**steps[0], "loss": math.nan}], [], tmp_path / "only-nan.png", title="run")
    assert imread(alone).shape == plain.shape


def test_evaluations_are_points_in_their_own_colours(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    steps, ledger = made_up_run()
    for line in steps[9::10]:
        line |= {"eval_loss": line["loss"] + 0.1, "eval_loss_ema": line["loss"] + 0.05}
    picture = imread(plot_run(steps, ledger, tmp_path / "evaluated.png", title="run"))[..., :3]
    for _, _, color in EVALUATIONS.values():
        assert (abs(picture - to_rgb(color)).max(axis=2) < 0.01).sum() > 100


def test_no_step_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="job: no finished step to draw"):
        plot_run([], [], tmp_path / "none.png", title="job")


def test_smoothing_neither_lags_nor_spreads_nan() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0], half_width=2) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert smooth([1.0, math.nan, 3.0], half_width=1) == [1.0, 2.0, 3.0]
