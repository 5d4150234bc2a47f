from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.planner.schedule import schedule_slots
from elastic_train.planner.schedule_plot import plot_schedule, schedule_figure


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_is_written(tmp_path: Path, suffix: str) -> None:
    out = plot_schedule("zero_bubble", 4, 8, 2, tmp_path / f"slots{suffix}")
    assert out.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_there_is_a_box_for_every_pass_at_its_time() -> None:
    (axes,) = schedule_figure("1f1b", 3, 5).axes
    boxes = {
        (round(path.get_extents().x0, 6), round(path.get_extents().x1, 6), round(path.get_extents().y0 + 0.43))
        for collection in axes.collections
        for path in collection.get_paths()
    }
    slots = schedule_slots("1f1b", 3, 5)
    assert boxes == {(slot.start, slot.end, row) for row, rank in enumerate(slots) for slot in rank}


def test_the_title_says_what_is_idle() -> None:
    (axes,) = schedule_figure("1f1b", 4, 8).axes
    assert axes.get_title(loc="left") == "1f1b: 4 ranks, 8 micro-batches; 27.3 % idle"
    kept = [text.get_text() for text in axes.texts if text.get_position()[0] > axes.get_xlim()[1]]
    assert kept == ["4", "3", "2", "1", "kept"]


def test_of_a_long_step_the_first_micro_batches_are_drawn() -> None:
    (axes,) = schedule_figure("interleaved_1f1b", 16, 512, 4).axes
    title = axes.get_title(loc="left")
    assert "512 micro-batches, the first 32 of them drawn; 0.7 % idle" in title


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"slots.gif: the picture of a schedule must end in .svg or .png"):
        plot_schedule("1f1b", 2, 4, 1, tmp_path / "slots.gif")


def test_the_picture_of_a_deep_pipeline_stays_small(tmp_path: Path) -> None:
    out = tmp_path / "deep.svg"
    plot_schedule("1f1b", 64, 128, 1, out)
    assert "<image" in out.read_text()
    assert out.stat().st_size < 2 * 2**20
    assert "<image" not in plot_schedule("1f1b", 4, 8, 1, out).read_text()
