"""What the runs of a scenario say: figures with their confidence, and where the time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.config.time_causes import Cause
from elastic_train.planner.simulation.confidence import Estimate, figures
from elastic_train.planner.simulation.scenario import Outcome


@dataclass(frozen=True, slots=True)
class Answer:
    """``price``: of one host and hour, in whatever currency; None: costs are left out."""

    name: str
    outcomes: Sequence[Outcome]
    price: float | None = None

    def figures(self) -> dict[str, Estimate]:
        """Name with unit -> over the runs; shares are in percent."""
        found = {
            "goodput %": figures(self.outcomes, lambda run: 100 * run.goodput),
            "ETTR %": figures(self.outcomes, lambda run: 100 * run.ettr),
            "progress %": figures(self.outcomes, lambda run: 100 * run.progress),
            "waiting %": figures(self.outcomes, lambda run: 100 * run.waiting),
            "failures": figures(self.outcomes, lambda run: run.failures),
            "interruptions": figures(self.outcomes, lambda run: run.interruptions),
            "restored from storage": figures(self.outcomes, lambda run: run.from_storage),
            "steps lost": figures(self.outcomes, lambda run: run.steps_lost),
            "steps finished": figures(self.outcomes, lambda run: run.steps),
            "host-hours": figures(self.outcomes, lambda run: run.host_seconds / 3600),
        }
        if (price := self.price) is not None:
            found["cost"] = figures(self.outcomes, lambda run: price * run.host_seconds / 3600)
            found["cost of what was not useful"] = figures(
                self.outcomes, lambda run: price * run.host_seconds * (1 - run.goodput) / 3600
            )
        return found

    def shares(self) -> dict[Cause, float]:
        """Cause -> mean percent of the hosts' time, in the order of the ledger's causes."""
        means = {
            cause: statistics.fmean(
                100 * run.seconds.get(cause, 0.0) / (run.host_seconds or 1.0) for run in self.outcomes
            )
            for cause in Cause
        }
        return {cause: share for cause, share in means.items() if share > 0}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "runs": len(self.outcomes),
            "events_per_run": statistics.fmean(run.events for run in self.outcomes),
            "figures": {name: each.as_dict() for name, each in self.figures().items()},
            "percent_of_host_time": {cause.value: share for cause, share in self.shares().items()},
        }
