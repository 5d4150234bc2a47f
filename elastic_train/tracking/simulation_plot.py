"""The picture of a simulation: what kept hosts from useful work over time and in all, and how sure the goodput is."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.tracking.plots import FAINT, INK, LOST, plain_axes
from elastic_train.tracking.time_plot import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 108
USEFUL = "useful"
UNITS = ((2 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From so many seconds on, a unit's seconds, its name."""

Moments = Sequence[tuple[float, Mapping[str, float]]]
"""(seconds since the start, host-seconds by cause until then)"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One scenario: the moments of its first run, mean percent by cause and goodput (percent) of all runs."""

    name: str
    moments: Moments
    shares: Mapping[str, float]
    goodputs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Curve:
    """The search for a best value: candidates along ``axis``, their losses, what was found and what theory says."""

    label: str
    axis: str
    values: Sequence[float]
    losses: Sequence[float]
    best: float | None
    marks: Mapping[str, float] = field(default_factory=dict)


def plot_simulation(panels: Sequence[Panel], out: str | Path, *, title: str, curve: Curve | None = None) -> Path:
    """Draw into the PNG ``out``: a row per scenario, and one for ``curve``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(panels) + (curve is not None)
    figure = Figure(figsize=(11, 1.0 + 3.1 * rows), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 2, width_ratios=(3, 2))
    for row, panel in enumerate(panels):
        _draw_over_time(figure.add_subplot(grid[row, 0]), panel)
        _draw_causes(figure.add_subplot(grid[row, 1]), panel)
    if curve is not None:
        _draw_curve(figure.add_subplot(grid[-1, :]), curve)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def binned(moments: Moments, count: int = _BINS) -> tuple[list[float], dict[str, list[float]]]:
    """Edges in seconds, and percent of the hosts' time by cause in each bin; between moments time is even."""
    edges = [moments[-1][0] * number / count for number in range(count + 1)]
    causes = list(moments[-1][1])
    totals = [{cause: _at(moments, edge, cause) for cause in causes} for edge in edges]
    shares: dict[str, list[float]] = {cause: [] for cause in causes}
    for before, after in itertools.pairwise(totals):
        spent = {cause: after[cause] - before[cause] for cause in causes}
        everything = sum(spent.values())
        for cause in causes:
            shares[cause].append(100 * spent[cause] / everything if everything else 0.0)
    return edges, shares


def _at(moments: Moments, time: float, cause: str) -> float:
    after = min(bisect.bisect_left(moments, time, key=lambda moment: moment[0]), len(moments) - 1)
    before = max(after - 1, 0)
    (begin, early), (end, late) = moments[before], moments[after]
    share = (time - begin) / (end - begin) if end > begin else 1.0
    return early.get(cause, 0.0) + share * (late.get(cause, 0.0) - early.get(cause, 0.0))


def _draw_over_time(axes: Axes, panel: Panel) -> None:
    edges, shares = binned(panel.moments)
    unit, name = next((unit, name) for least, unit, name in UNITS if edges[-1] >= least)
    bottom = [0.0] * (len(edges) - 1)
    left = [edge / unit for edge in edges[:-1]]
    for cause in (cause for cause in COLORS if cause in shares and cause != USEFUL):
        axes.bar(left, shares[cause], width=edges[1] / unit, bottom=bottom, align="edge", color=COLORS[cause])
        bottom = [below + share for below, share in zip(bottom, shares[cause], strict=True)]
    axes.set_title(f"{panel.name}: not useful, % of host time (first run)", loc="left", fontsize=10, color=INK)
    axes.set_xlabel(f"{name} since the start", color=INK)
    axes.margins(x=0)
    plain_axes(axes)


def _draw_causes(axes: Axes, panel: Panel) -> None:
    causes = [cause for cause in COLORS if panel.shares.get(cause, 0.0) > 0.0005 and cause != USEFUL]
    causes.sort(key=lambda cause: panel.shares[cause])
    axes.barh(
        [cause.replace("_", " ") for cause in causes],
        [panel.shares[cause] for cause in causes],
        color=[COLORS[cause] for cause in causes],
    )
    for row, cause in enumerate(causes):
        axes.text(panel.shares[cause], row, f" {panel.shares[cause]:.2g} %", va="center", fontsize=8.5, color=INK)
    low, high = min(panel.goodputs), max(panel.goodputs)
    mean = sum(panel.goodputs) / len(panel.goodputs)
    axes.set_title(f"goodput {mean:.2f} % (runs: {low:.2f} to {high:.2f})", loc="left", fontsize=10, color=INK)
    axes.margins(x=0.18)
    plain_axes(axes)
    axes.grid(visible=False)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    axes.plot(curve.values, curve.losses, "o-", color="#1f4e79", markersize=4, linewidth=1)
    if curve.values[0] > 0:
        axes.set_xscale("log")
        axes.set_xticks(curve.values, [f"{value:,.0f}" for value in curve.values])
        axes.minorticks_off()
    if curve.best is not None:
        axes.axvline(curve.best, color=LOST, linewidth=1.4, label=f"best: {curve.best:,.4g}")
    for name, value in curve.marks.items():
        axes.axvline(value, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label=f"{name}: {value:,.4g}")
    axes.set_title(curve.label, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(curve.axis, color=INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)
    plain_axes(axes)
