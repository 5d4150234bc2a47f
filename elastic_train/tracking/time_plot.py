"""Where the time of a job's hosts went, as a picture: hosts over the clock, coloured by what they did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.tracking.plots import FAINT, INK, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "useful": "#2a7f62",
    "evaluation": "#8cc6a8",
    "data_wait": "#d9d16b",
    "checkpoint_stall": "#f2a35e",
    "start": "#9ecae1",
    "teardown": "#f4a6a6",
    "form": "#d4777b",
    "restore": "#a8404a",
    "first_step": "#e8c3a0",
    "detection": "#c0392b",
    "lost_step": "#5b1a1a",
    "replayed": "#7a3e9d",
    "skipped": "#b084cc",
    "idle_spare": "#cfd6dc",
    "waiting": "#b59a7a",
    "finishing": "#4c78a8",
}
"""Cause of the ledger's time accounts -> its colour, bottom to top."""
DARK = ("useful", "detection", "lost_step", "replayed", "restore", "finishing")
MOST_LINES = 2000
"""Accounts are cumulative: of more than these every second one will do."""

Line = Mapping[str, Any]
Piece = tuple[float, float, dict[str, float]]
"""Begin and end in Unix seconds, host-seconds by cause in between."""


class TimeHistory:
    """The lines of a ledger that the picture needs."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, line: Line) -> None:
        """Take a line of the ledger, whatever it is."""
        if line.get("event") not in ("job_started", "time_account"):
            return
        self.lines.append(line)
        if len(self.lines) > MOST_LINES:
            last = len(self.lines) - 1
            kept = [at for at, each in enumerate(self.lines) if at % 2 == last % 2 or each["event"] == "job_started"]
            self.lines = [self.lines[at] for at in kept]


def plot_time(ledger: Iterable[Line], out: str | Path, *, title: str) -> Path:
    """Draw the time accounts of a ledger into the PNG ``out``; raises ValueError when there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    history = TimeHistory()
    for line in ledger:
        history.add(line)
    drawn = pieces(history.lines)
    total = {cause: sum(spent.get(cause, 0.0) for _, _, spent in drawn) for cause in COLORS}
    host_seconds = sum(total.values())
    if host_seconds <= 0:
        raise ValueError(f"{title}: no time account to draw")
    figure = Figure(figsize=(11, 5.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=(5, 1))
    causes = [cause for cause in COLORS if total[cause] > 0]
    _draw_hosts(top, drawn, causes)
    _draw_total(bottom, {cause: 100 * total[cause] / host_seconds for cause in causes})
    figure.legend(*top.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9, reverse=True)
    text = f"{title}: goodput {100 * total['useful'] / host_seconds:.1f} % of {host_seconds:,.0f} host-seconds"
    figure.suptitle(text, x=0.01, ha="left", color=INK, fontsize=13)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def pieces(lines: Sequence[Line]) -> list[Piece]:
    """What each account adds to the one before it."""
    found = []
    begin: float | None = None
    before: Mapping[str, float] = {}
    for line in lines:
        if line["event"] == "job_started":
            begin, before = line["time"], {}
            continue
        spent = {cause: seconds - before.get(cause, 0.0) for cause, seconds in line["seconds"].items()}
        if begin is None:  # within a run: what was before is not ours to draw
            begin, before = line["time"], line["seconds"]
        if line["time"] > begin:
            found.append((begin, line["time"], spent))
            begin, before = line["time"], line["seconds"]
    return found


def _draw_hosts(axes: Axes, drawn: Sequence[Piece], causes: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    edges: list[float] = []
    heights: dict[str, list[float]] = {cause: [] for cause in causes}
    start = drawn[0][0]
    for begin, end, spent in drawn:
        for moment, share in ((begin, 1.0), (end, 0.0)):  # between two runs there is nothing
            edges.append(moment - start)
            for cause in causes:
                # A step that turned out to be lost is taken back from useful time: a fraction of a step.
                heights[cause].append(max(spent.get(cause, 0.0), 0.0) * share / (end - begin))
    unit, name = (60.0, "minutes") if edges[-1] > 300 else (1.0, "seconds")
    labels = [cause.replace("_", " ") for cause in causes]
    axes.stackplot(
        [edge / unit for edge in edges],
        [heights[cause] for cause in causes],
        labels=labels,
        colors=[COLORS[cause] for cause in causes],
        step="post",
        linewidth=0,
    )
    axes.set_ylabel("hosts", color=INK)
    axes.set_xlabel(f"{name} since the start", color=INK)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    plain_axes(axes)


def _draw_total(axes: Axes, shares: Mapping[str, float]) -> None:
    """``shares`` in percent."""
    left = 0.0
    for cause, share in shares.items():
        axes.barh(0, share, left=left, color=COLORS[cause], height=0.6)
        if share >= 4:
            ink = "white" if cause in DARK else INK
            axes.text(
                left + share / 2,
                0,
                f"{share:.0f} %",
                ha="center",
                va="center",
                fontsize=9,
                color=ink,
            )
        left += share
    axes.set_xlim(0, 100)
    axes.set_yticks([])
    axes.set_xlabel("% of all host-seconds", color=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
