from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.tracking.simulation_plot import Curve, Panel, binned, plot_simulation
from elastic_train.tracking.time_plot import COLORS

MOMENTS = [
    (0.0, {}),
    (40.0, {"useful": 80.0}),
    (50.0, {"useful": 80.0, "detection": 20.0}),
    (100.0, {"useful": 180.0, "detection": 20.0}),
]


def test_bins_hold_what_happened_in_them() -> None:
    edges, shares = binned(MOMENTS, count=10)
    assert edges == pytest.approx([10.0 * number for number in range(11)])
    assert shares["detection"] == pytest.approx([0, 0, 0, 0, 100, 0, 0, 0, 0, 0])
    assert binned(MOMENTS, count=4)[1]["detection"] == pytest.approx([0, 40, 0, 0])


def test_the_picture_shows_causes_and_the_curve(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    panel = Panel("elastic", MOMENTS, {"useful": 90.0, "detection": 10.0}, [89.0, 91.0])
    curve = Curve("loss", "spares", [1.0, 2.0, 4.0], [3.0, 1.0, 2.0], 2.0, {"Young": 2.5})
    plain = imread(plot_simulation([panel], tmp_path / "plots" / "a.png", title="run"))[..., :3]
    both = imread(plot_simulation([panel, panel], tmp_path / "b.png", title="run", curve=curve))

    def share(cause: str) -> float:
        return float((abs(plain - to_rgb(COLORS[cause])).max(axis=2) < 0.01).mean())

    assert share("detection") > 0.02
    assert share("useful") == share("replayed") == 0
    assert both.shape[0] > 2 * plain.shape[0]
