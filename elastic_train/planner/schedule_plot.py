"""A picture of a pipeline schedule: a line per rank, a box per pass, white where a rank has nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.planner.schedule import Kind, Slot, bubble_fraction, idle_share, peak_live, schedule_slots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#22303c", "#8a96a3"
COLOURS: dict[Kind, tuple[str, tuple[float, float, float]]] = {
    "F": ("forward", (0.30, 0.47, 0.66)),
    "B": ("backward", (0.90, 0.55, 0.25)),
    "W": ("gradients of weights", (0.30, 0.58, 0.47)),
}
MOST_SLOTS = 600
"""Beyond this only the first micro-batches are drawn: no more can be told apart."""
MOST_SHAPES = 5000
"""Of more slots an SVG gets pixels: each would be a shape of its own, and a page of them many megabytes."""
NUMBERED = 0.009
"""Share of the picture's width from which on a box has room for the number of its micro-batch."""


def plot_schedule(name: str, pp: int, micro_batches: int, stages_per_rank: int, out: str | Path) -> Path:
    """Draw into ``out``, an .svg or .png. Raises ValueError for another suffix, and as ``schedule_order`` does."""
    out = Path(out)
    if out.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"{out}: the picture of a schedule must end in .svg or .png")
    figure = schedule_figure(name, pp, micro_batches, stages_per_rank)
    figure.savefig(out, format=out.suffix.lower()[1:], dpi=130)
    return out


def schedule_figure(name: str, pp: int, micro_batches: int, stages_per_rank: int = 1) -> Figure:
    """Slots of equal stages, time in forward passes; the title says which share is idle, the right margin how many
    micro-batches' activations a rank keeps at most.
    """
    # The object interface: pyplot would keep state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = _drawn(name, pp, micro_batches, stages_per_rank)
    ranks = schedule_slots(name, pp, drawn, stages_per_rank)
    idle = idle_share(ranks) if drawn == micro_batches else bubble_fraction(name, pp, micro_batches, stages_per_rank)
    figure = Figure(figsize=(12, 1.5 + 0.36 * pp), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    many = sum(map(len, ranks)) > MOST_SHAPES
    for row, slots in enumerate(ranks):
        _draw_rank(axes, row, slots, pp, stages_per_rank, many)
    end = max(slot.end for slots in ranks for slot in slots)
    _number(axes, ranks, end, pp)
    for row, most in enumerate(peak_live(name, pp, micro_batches, stages_per_rank)):
        axes.text(1.005 * end, row, f"{most / stages_per_rank:g}", va="center", fontsize=8, color=INK)
    axes.text(1.005 * end, -0.85, "kept", va="center", fontsize=8, color=FAINT)
    axes.set_xlim(0, end)
    _label(axes, pp, stages_per_rank)
    first = "" if drawn == micro_batches else f", the first {drawn} of them drawn"
    each = f" x {stages_per_rank} stages" if stages_per_rank > 1 else ""
    text = f"{name}: {pp} ranks{each}, {micro_batches} micro-batches{first}; {100 * idle:.1f} % idle"
    axes.set_title(text, loc="left", color=INK, fontsize=11)
    _legend(figure, {slot.kind for slot in ranks[0]})
    return figure


def _drawn(name: str, pp: int, micro_batches: int, stages: int) -> int:
    """As many micro-batches as can be told apart, in whole rounds, and enough to fill the pipeline."""
    most = max(2, MOST_SLOTS // (3 * pp * pp * stages)) * pp
    return micro_batches if micro_batches <= most else most


def _draw_rank(axes: Axes, row: int, slots: Sequence[Slot], pp: int, stages: int, pixels: bool) -> None:
    """Later stages of a rank are lighter."""
    groups: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
    for slot in slots:
        groups.setdefault((slot.kind, slot.stage // pp), []).append((slot.start, slot.end - slot.start))
    for (kind, local), spans in groups.items():
        lighter = 0.45 * local / max(1, stages - 1)
        colour = [part + (1 - part) * lighter for part in COLOURS[kind][1]]
        bars = axes.broken_barh(spans, (row - 0.43, 0.86), facecolor=colour, edgecolor="white", linewidth=0.5)
        bars.set_rasterized(pixels)


def _number(axes: Axes, ranks: Sequence[Sequence[Slot]], end: float, pp: int) -> None:
    """From 0 on, as in the schedules; dark on light boxes."""
    for row, slots in enumerate(ranks):
        for slot in slots:
            width = slot.end - slot.start
            if width / end >= NUMBERED:
                place, ink = (slot.start + width / 2, row), "white" if slot.stage < pp else INK
                axes.text(*place, str(slot.micro_batch), ha="center", va="center", fontsize=6.5, color=ink)


def _label(axes: Axes, pp: int, stages: int) -> None:
    axes.set_yticks(range(pp), [f"rank {row}" for row in range(pp)])
    axes.invert_yaxis()
    axes.set_ylim(pp - 0.5, -0.5)
    more = "; darker: a rank's first stage" if stages > 1 else ""
    kept = "; kept: micro-batches whose activations a rank holds at most"
    axes.set_xlabel(f"time, in forward passes of a stage{more}{kept}", color=INK, fontsize=9)
    axes.tick_params(colors=INK, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FAINT)


def _legend(figure: Figure, kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label) for kind, (label, colour) in COLOURS.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=8)
