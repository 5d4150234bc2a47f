"""Pictures of a plan: the slots of its pipeline, memory by rank, time by layout."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from elastic_train.cli.plan_answer import Priced

INK = "#22303c"
COLOURS = (
    "#4c78a8", "#f2a35e", "#72b7a2", "#b07aa1", "#9c9c5c", "#d4777b", "#86bcb6", "#e3c567", "#7d6b91", "#5d8a66",
    "#c98f66", "#6f8fa8", "#b5b5b5", "#a05195",
)  # fmt: skip


def picture(row: Priced, kind: str) -> bytes:
    """The pipeline of a layout as ``svg`` or ``png``. Raises UserError for a layout without pipeline."""
    if row.candidate.layout.pp == 1:
        raise UserError(
            f"--pipeline-picture: {row.candidate.layout} has no pipeline; ask with parallel.pp=4, for example, or "
            "--show another one"
        )
    out = io.BytesIO()
    pipeline_figure(row).savefig(out, format=kind, dpi=130)
    return out.getvalue()


def as_svg(figure: Figure) -> str:
    """The ``<svg>`` element alone, for an HTML page. The same picture gives the same text."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "elastic_train", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # The object interface: pyplot would keep state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    return figure, axes


def pipeline_figure(row: Priced) -> Figure:
    """The slots of a layout's pipeline."""
    from elastic_train.planner.constraints import micro_batches_per_rank
    from elastic_train.planner.schedule_plot import schedule_figure

    job, layout = row.candidate.job, row.candidate.layout
    count = micro_batches_per_rank(job, layout)
    return schedule_figure(job.parallel.pipeline, layout.pp, count, job.parallel.stages_per_rank)


def memory_figure(row: Priced) -> Figure:
    """Stacked terms of every pipeline rank, in GiB, and the limit."""
    bars = {f"rank {index}": rank.terms for index, rank in enumerate(row.memory)}
    figure, axes = _stacked(bars, 2**30)
    axes.axvline(row.memory_limit / 2**30, color="#c0392b", linewidth=1.2)
    axes.set_xlabel("GiB per accelerator; the line is its memory", color=INK, fontsize=9)
    axes.set_title(f"Memory of {row.candidate.layout} by pipeline rank", loc="left", color=INK, fontsize=10)
    return figure


def time_figure(rows: Sequence[Priced]) -> Figure:
    """Stacked terms of the step of every layout, in seconds."""
    figure, axes = _stacked(
        {f"#{n} {row.candidate.layout}": row.candidate.time.terms for n, row in enumerate(rows, 1)}, 1
    )
    axes.set_xlabel("seconds per step", color=INK, fontsize=9)
    axes.set_title("Time of a step by layout", loc="left", color=INK, fontsize=10)
    return figure


def _stacked(bars: Mapping[str, Mapping[str, float]], unit: float) -> tuple[Figure, Axes]:
    """Horizontal bars of ``{bar: {term: value}}``, values divided by ``unit``."""
    terms = list(dict.fromkeys(term for values in bars.values() for term in values))
    figure, axes = _figure(11, max(1.4 + 0.32 * len(bars), 0.6 + 0.18 * len(terms)))  # bars, or the legend beside them
    colours = {term: COLOURS[index % len(COLOURS)] for index, term in enumerate(terms)}
    for index, values in enumerate(bars.values()):
        left = 0.0
        for term in terms:
            width = values.get(term, 0.0) / unit
            axes.barh(index, width, left=left, height=0.7, color=colours[term])
            left += width
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    _legend(axes, colours)
    return figure, axes


def _legend(axes: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=label) for label, colour in colours.items()],
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, labelcolor=INK,
    )  # fmt: skip
