"""The picture of a run: loss and throughput over steps, one band per generation, a mark where one was lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.storage.json_lines import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from elastic_train.storage.store import Store

Line = Mapping[str, Any]
"""One line of ``steps.jsonl`` or ``ledger.jsonl``."""

BANDS = ("#4c78a8", "#f2a35e", "#72b7a2", "#b07aa1", "#9c9c5c", "#d4777b")
INK, FAINT, LOSS, RATE, LOST = "#22303c", "#8a96a3", "#1f4e79", "#2a7f62", "#c0392b"
EVALUATIONS = {
    "eval_loss": ("evaluation", "o", "#d0660f"),
    "eval_loss_ema": ("evaluation, averaged weights", "D", "#7a3e9d"),
}
"""Key of a step's line -> how its points are drawn: label, marker, colour."""
PLANNED = (None, "start", "growth")
CAUSES = {
    "host_lost": "host lost",
    "host_silent": "host silent",
    "preemption": "node taken away",
    "trainer_killed": "trainer killed",
    "trainer_crashed": "trainer crashed",
    "out_of_memory": "out of memory",
    "exception": "exception",
    "bad_step": "bad step",
    "straggler": "straggler replaced",
    "hang": "hang",
    "coordinator_lost": "coordinator lost",
    "growth": "host joined",
    "start": "resubmitted",
}
"""Causes of a generation in the ledger, as written into the picture; others are shown as they are."""
HALF_WIDTH = 4
"""Steps to each side that the thick curve averages over."""
LABEL_FRACTION = 0.06
"""Bands narrower than this part of the axis keep their layout label to themselves."""


def plot_job(store: Store, out: str | Path) -> Path:
    """Draw ``steps.jsonl`` and ``ledger.jsonl`` of a job folder into the PNG ``out``."""
    steps, ledger = read_json_lines(store, "steps.jsonl"), read_json_lines(store, "ledger.jsonl")
    return plot_run(steps, ledger, out, title=store.uri.rstrip("/").rpartition("/")[2])


def plot_run(steps: Sequence[Line], ledger: Sequence[Line], out: str | Path, *, title: str) -> Path:
    """Draw finished steps and events into the PNG ``out``; raises ValueError when no step is finished."""
    # The object interface: pyplot would keep state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not steps:
        raise ValueError(f"{title}: no finished step to draw")
    steps = sorted(steps, key=lambda line: int(line["step"]))
    figure = Figure(figsize=(11, 6.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.15))
    _draw_loss(top, steps)
    _draw_rate(bottom, steps)
    _draw_generations(top, bottom, steps, ledger)
    for axes in (top, bottom):
        plain_axes(axes)
    bottom.set_xlabel("optimizer step", color=INK)
    first, last = int(steps[0]["step"]), int(steps[-1]["step"])
    bottom.set_xlim(first - 0.5, last + 0.5)
    tokens = sum(line.get("valid_tokens", 0) for line in steps)
    figure.suptitle(f"{title}: {last - first + 1} steps, {tokens:,} tokens", x=0.01, ha="left", color=INK, fontsize=13)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def _draw_loss(axes: Axes, steps: Sequence[Line]) -> None:
    numbers = [line["step"] for line in steps]
    losses = [math.nan if line["loss"] is None else float(line["loss"]) for line in steps]
    axes.plot(numbers, losses, color=LOSS, linewidth=1.0, alpha=0.35)
    axes.plot(numbers, smooth(losses), color=LOSS, linewidth=2.0)
    finite = [loss for loss in losses if math.isfinite(loss)] + _draw_evaluations(axes, steps)
    broken = [number for number, loss in zip(numbers, losses, strict=True) if not math.isfinite(loss)]
    if broken and finite:
        axes.plot(broken, [max(finite)] * len(broken), "x", color=LOST, label="loss not finite")
    if axes.get_legend_handles_labels()[0]:
        # Below the curve, which falls: the labels of the bands are above it.
        axes.legend(loc="lower left", frameon=False, fontsize=8.5)
    axes.set_ylabel("loss", color=INK)
    if finite:
        low, high = min(finite), max(finite)
        room = (high - low) or 1.0
        axes.set_ylim(low - 0.06 * room, high + 0.22 * room)  # above the curve: labels of the bands


def _draw_evaluations(axes: Axes, steps: Sequence[Line]) -> list[float]:
    """Draws the points and returns their finite values."""
    drawn: list[float] = []
    for key, (label, marker, color) in EVALUATIONS.items():
        points = {line["step"]: float(line[key]) for line in steps if line.get(key) is not None}
        if points:
            axes.plot(list(points), list(points.values()), marker, markersize=4.5, color=color, label=label)
            drawn += [value for value in points.values() if math.isfinite(value)]
    return drawn


def _draw_rate(axes: Axes, steps: Sequence[Line]) -> None:
    rates = [line.get("valid_tokens", 0) / line["seconds"] if line.get("seconds") else math.nan for line in steps]
    axes.plot([line["step"] for line in steps], rates, color=RATE, linewidth=1.2)
    axes.set_ylabel("tokens/s", color=INK)
    axes.set_ylim(bottom=0)


def _draw_generations(top: Axes, bottom: Axes, steps: Sequence[Line], ledger: Sequence[Line]) -> None:
    formed = {line["generation"]: line for line in ledger if line.get("event") == "generation_formed"}
    total = len(steps)
    for index, (number, group) in enumerate(itertools.groupby(steps, key=lambda line: line.get("generation"))):
        lines = list(group)
        left, right = lines[0]["step"] - 0.5, lines[-1]["step"] + 0.5
        for axes in (top, bottom):
            axes.axvspan(left, right, color=BANDS[index % len(BANDS)], alpha=0.13, linewidth=0)
        if len(lines) >= LABEL_FRACTION * total:
            label = f"{lines[0].get('layout', '')}\n"
            hosts = formed.get(number, {}).get("hosts")
            label += f"generation {number}" + (f", {hosts} hosts" if isinstance(hosts, int) else "")
            top.text((left + right) / 2, 0.985, label, transform=top.get_xaxis_transform(), ha="center", va="top",
                     fontsize=8.5, color=INK)  # fmt: skip
        cause = formed.get(number, {}).get("cause")
        if index and cause is not None:
            _mark(top, bottom, left, cause, formed[number].get("recovery_seconds"), index)


def _mark(top: Axes, bottom: Axes, place: float, cause: str, seconds: float | None, index: int) -> None:
    color = FAINT if cause in PLANNED else LOST
    for axes in (top, bottom):
        axes.axvline(place, color=color, linewidth=1.2, linestyle=(0, (4, 3)))
    text = CAUSES.get(cause, str(cause).replace("_", " "))
    if seconds is not None:
        text += f", {seconds:.1f} s"
    # Neighbouring marks at different heights, so that a host that leaves and comes back is readable.
    top.text(
        place, 0.80 - 0.08 * (index % 3), f" {text}", transform=top.get_xaxis_transform(), color=color, fontsize=8.5
    )


def plain_axes(axes: Axes) -> None:
    """No frame, faint lines across."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=FAINT, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)


def smooth(values: Sequence[float], half_width: int = HALF_WIDTH) -> list[float]:
    """Mean of the finite values up to ``half_width`` places to each side, fewer towards the ends: it does not lag."""
    smoothed = []
    for place in range(len(values)):
        reach = min(half_width, place, len(values) - 1 - place)
        window = [value for value in values[place - reach : place + reach + 1] if math.isfinite(value)]
        smoothed.append(sum(window) / len(window) if window else math.nan)
    return smoothed
