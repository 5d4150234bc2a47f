"""The figures of an answer of ``elastic-train simulate``, as rows of tables and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_train.cli.simulate_best import Search
from elastic_train.cli.simulate_question import Question
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.answer import Answer
from elastic_train.tracking.simulation_plot import Panel, plot_simulation


def figure_rows(answers: Sequence[Answer]) -> list[list[Any]]:
    """Recovery, figure, mean, margin, 5th and 95th percentile."""
    return [
        [answer.name, name, each.mean, each.margin, each.low, each.high]
        for answer in answers
        for name, each in answer.figures().items()
    ]


def cause_rows(question: Question, answers: Sequence[Answer]) -> list[list[Any]]:
    """Cause, percent of host time in each answer, and as measured."""
    shares = [answer.shares() for answer in answers]
    if question.measured is not None:
        total = sum(question.measured.seconds.values())
        shares.append({Cause(cause): 100 * spent / total for cause, spent in question.measured.seconds.items()})
    found = [cause for cause in Cause if any(cause in each for each in shares)]
    return [[cause.value, *(each.get(cause, 0.0) for each in shares)] for cause in found]


def cause_columns(question: Question, answers: Sequence[Answer]) -> list[str]:
    return [answer.name for answer in answers] + (["measured"] if question.measured is not None else [])


def number(value: float) -> str:
    """``1,234``, ``99.41``, or ``<0.01`` where nobody needs to know how much less."""
    if 0 < abs(value) < 0.01:
        return "<0.01"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw(
    question: Question, answers: Sequence[Answer], search: Search | None, out: Path, title: str | None = None
) -> Path:
    """The picture; ``title``: in place of the question."""
    panels = [
        Panel(
            answer.name,
            [
                (at, {cause.value: spent for cause, spent in seconds.items()})
                for at, seconds in answer.outcomes[0].moments
            ],
            {cause.value: share for cause, share in answer.shares().items()},
            [100 * run.goodput for run in answer.outcomes],
        )
        for answer in answers
    ]
    return plot_simulation(
        panels,
        out,
        title=question.title if title is None else title,
        curve=search.curve() if search and search.best.candidates else None,
    )
