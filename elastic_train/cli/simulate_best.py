"""The best value that ``elastic-train simulate --best`` finds, and the sentence that tells it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.interval import daly, young
from elastic_train.cli.simulate_question import Case
from elastic_train.planner.simulation.best import (
    FLAT,
    Best,
    best_interval,
    best_spares,
    shortest,
    time_between_falls,
)
from elastic_train.planner.simulation.confidence import Runs
from elastic_train.tracking.simulation_plot import Curve


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


def search_best(what: str, case: Case, runs: int, seed: int) -> Search:
    """``what``: interval or spares."""
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
