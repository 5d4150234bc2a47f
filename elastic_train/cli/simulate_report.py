"""What ``elastic-train simulate`` prints and draws."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from elastic_train.checkpoint.interval import daly, young
from elastic_train.cli.guard import UserError
from elastic_train.cli.simulate_asked import Asked
from elastic_train.cli.simulate_question import Case, Question
from elastic_train.cli.tables import Column, print_table
from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.answer import Answer
from elastic_train.planner.simulation.best import (
    FLAT,
    Best,
    best_interval,
    best_spares,
    shortest,
    time_between_falls,
)
from elastic_train.planner.simulation.confidence import Runs
from elastic_train.tracking.simulation_plot import Curve, Panel, plot_simulation


@dataclass(frozen=True, slots=True)
class Search:
    """For one best value: what was found, what the formulas say (seconds), and the sentence that tells it."""

    what: str
    best: Best
    marks: dict[str, float]
    sentence: str

    def curve(self) -> Curve:
        tried = self.best.candidates
        axis = "seconds of work between checkpoints" if self.what == "interval" else "spare nodes"
        loss = (
            "share of the steps that is not finished"
            if self.what == "interval"
            else "host-seconds per step over an ideal step's"
        )
        values, losses = [each.value for each in tried], [each.loss.mean for each in tried]
        return Curve(loss, axis, values, losses, self.best.value, self.marks)

    def as_dict(self) -> dict[str, Any]:
        tried = [{"value": each.value, "loss": each.loss.as_dict()} for each in self.best.candidates]
        return {
            "what": self.what,
            "value": self.best.value,
            "sure": self.best.sure,
            "as_good": self.best.flat,
            "formulas": self.marks,
            "candidates": tried,
        }


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
    search = _search(best, question.cases[0], len(answers[0].outcomes), asked.seed) if best else None
    if as_json:
        typer.echo(json.dumps(_as_dict(question, answers, search), indent=1))
    else:
        _print(question, answers, search)
    if plot is not None:
        draw(question, answers, search, plot)
    if html is not None:
        from elastic_train.cli.simulate_html import write_page

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


def _search(what: str, case: Case, runs: int, seed: int) -> Search:
    return _search_spares(case, runs, seed) if what == "spares" else _search_interval(case, runs, seed)


def _search_interval(case: Case, runs: int, seed: int) -> Search:
    scenario = case.scenario
    drawn = Runs(scenario, seed, runs)
    best = best_interval(drawn, scenario)
    if best.value is None:
        sentence = (
            f"best interval ({case.name}): no failure in these runs took the state in memory with it, so they do not "
            "tell: checkpoints only bound what such a loss would take; more --days or --runs may meet one"
        )
        return Search("interval", best, {}, sentence)
    outcomes = drawn.outcomes()
    mtbf, stall = time_between_falls(outcomes), scenario.saves.stall
    marks = {"Young": young(stall, mtbf), "Daly": daly(stall, mtbf)} if mtbf and stall else {}
    told = [f"best interval ({case.name}): {best.value:,.4g} s of work"]
    if best.value <= shortest(scenario):
        told[0] += ", the shortest that a save's own time allows"
    if best.sure is not None:
        told.append("resampled runs give {:,.0f} to {:,.0f} s".format(*best.sure))
    if best.flat is not None:
        told.append("{:,.0f} to {:,.0f} s lose less than {:g} points".format(*best.flat, 100 * FLAT))
    told += [f"{name} {seconds:,.0f} s" for name, seconds in marks.items()]
    told.append(f"{statistics.fmean(run.from_storage for run in outcomes):,.1f} failures a run go to storage")
    return Search("interval", best, marks, "; ".join(told))


def _search_spares(case: Case, runs: int, seed: int) -> Search:
    best = best_spares(case.scenario, seed, runs, max(8, case.scenario.nodes // 32))
    found = next(each for each in best.candidates if each.value == best.value)
    most = best.candidates[-1].value
    sentence = (
        f"best number of spare nodes ({case.name}): {best.value:.0f} of up to {most:.0f}; a step then costs "
        f"{found.loss.mean:.4f} times the host-seconds of one without failures and spares (none: "
        f"{best.candidates[0].loss.mean:.4f})"
    )
    if best.sure is not None and best.sure[0] < best.sure[1]:
        sentence += "; {:.0f} to {:.0f} cost the same as far as these runs tell".format(*best.sure)
    if best.value == most:
        sentence += "; that is the most that was tried, more may cost still less"
    return Search("spares", best, {}, sentence)
