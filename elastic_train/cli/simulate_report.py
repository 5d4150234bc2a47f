"""What ``elastic-train simulate`` prints and draws."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from elastic_train.cli.guard import UserError
from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_best import Search, search_best
from elastic_train.cli.simulate_figures import cause_columns, cause_rows, draw, figure_rows, number
from elastic_train.cli.simulate_html import write_page
from elastic_train.cli.simulate_question import Question
from elastic_train.cli.tables import Column, print_table
from elastic_train.planner.simulation.answer import Answer


def report(
    question: Question,
    asked: Asked,
    *,
    price: float | None,
    best: str | None,
    as_json: bool,
    plot: Path | None,
    html: Path | None,
) -> None:
    """Run the question and say the answer. Raises UserError for a file that cannot be written, before it runs."""
    _check_files(plot, html)
    drawn = plot is not None or html is not None
    answers = [Answer(case.name, case.outcomes(drawn), price) for case in question.cases]
    search = search_best(best, question.cases[0], len(answers[0].outcomes), asked.seed) if best else None
    if as_json:
        typer.echo(json.dumps(_as_dict(question, answers, search), indent=1))
    else:
        _print(question, answers, search)
    if plot is not None:
        draw(question, answers, search, plot)
    if html is not None:
        write_page(html, question, answers, search)


def _check_files(plot: Path | None, html: Path | None) -> None:
    if plot is not None and plot.suffix.lower() != ".png":
        raise UserError(f"--plot={plot}: must end in .png")
    for name, out in (("--plot", plot), ("--html", html)):
        if out is None:
            continue
        if out.is_dir():
            raise UserError(f"{name}={out}: is a folder; give a file")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out.parent):
                pass
        except OSError as error:
            raise UserError(f"{name}={out}: cannot be written ({error.strerror}); give another place") from None


def _as_dict(question: Question, answers: Sequence[Answer], search: Search | None) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "question": question.title,
        "notes": question.notes,
        "answers": {each.name: each.as_dict() for each in answers},
    }
    if question.measured is not None:
        seen = question.measured
        answer["measured"] = {"goodput %": 100 * seen.goodput, "seconds": dict(seen.seconds)}
    if search is not None:
        answer["best"] = search.as_dict()
    return answer


def _print(question: Question, answers: Sequence[Answer], search: Search | None) -> None:
    typer.echo(question.title)
    names = [Column("recovery", left=True), Column("figure", left=True)]
    print_table([*names, *(Column(name, number) for name in ("mean", "+-", "p5", "p95"))], figure_rows(answers))
    typer.echo("")
    columns = [Column(f"{name} %", number) for name in cause_columns(question, answers)]
    print_table([Column("host time", left=True), *columns], cause_rows(question, answers))
    typer.echo("")
    if question.measured is not None:
        simulated = statistics.fmean(100 * run.goodput for run in answers[0].outcomes)
        seen = 100 * question.measured.goodput
        typer.echo(f"goodput measured {seen:.1f} %, simulated {simulated:.1f} %: {simulated - seen:+.1f} points")
    if search is not None:
        typer.echo(search.sentence)
    for note in question.notes:
        typer.echo(note)
    events = statistics.fmean(run.events for answer in answers for run in answer.outcomes)
    typer.echo(f"+-: 95 % confidence of the mean; p5, p95: of single runs; {events:,.0f} events per run")
