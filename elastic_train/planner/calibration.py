"""How fast an accelerator really is, from the steps of a finished run.

Two numbers are fitted: the efficiency of its compute, with which goes what a block costs on CPUs whatever its size, as
the same cores do both, and one factor for the speeds of its links. What a run tells is
the median time of a step for each layout it went through. With one layout only the efficiency can be told: it takes the
whole difference, and links stay as they are unless compute at full efficiency is still too slow or too fast for it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.layout import AXES, Layout
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.step_time import step_time

WARM_UP = 3
"""First steps of a generation are left out: they allocate, compile and connect."""
FEWEST = 3
"""Steps that a layout must have, after those, to be believed."""
WORST = 0.1
"""Relative difference of a prediction from which on a calibration is not to be used."""
_EFFICIENCIES, _LINKS = (1e-4, 1.0), (1e-3, 1e3)
_GRID, _ROUNDS = 9, 8


class NothingToLearn(Exception):
    """The run has no steps to calibrate from; the message says what would do."""


@dataclass(frozen=True, slots=True)
class Measured:
    """``seconds``: median of ``steps`` steps in ``layout``, without waiting for data and storage."""

    layout: Layout
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """``accelerator`` with what the run taught; ``fits``: (measured, seconds that are now predicted)."""

    accelerator: Accelerator
    fits: tuple[tuple[Measured, float], ...]
    goodput: float | None
    """share of the hosts' time that was useful, by the run's ledger"""
    link_factor: float

    @property
    def worst(self) -> float:
        """Largest relative difference of a prediction."""
        return max(abs(predicted / measured.seconds - 1) for measured, predicted in self.fits)

    @property
    def at_a_bound(self) -> bool:
        """Whether the best fit would have gone further than what can be."""
        values = ((self.accelerator.efficiency, _EFFICIENCIES), (self.link_factor, _LINKS))
        return any(not low * 1.001 < value < high / 1.001 for value, (low, high) in values)


def measured_steps(steps: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Medians by layout, of lines of ``steps.jsonl``; layouts with too few steps are left out."""
    seen: dict[int, int] = defaultdict(int)
    times: dict[str, list[float]] = defaultdict(list)
    for line in steps:
        seen[line["generation"]] += 1
        if seen[line["generation"]] <= WARM_UP or line.get("skipped") or "evaluations" in line:
            continue
        waited = line.get("data_seconds", 0.0) + line.get("stall_seconds", 0.0)
        times[line["layout"]].append(max(line["seconds"] - waited, 1e-9))
    return [
        Measured(layout_of(text), statistics.median(values), len(values))
        for text, values in sorted(times.items())
        if len(values) >= FEWEST
    ]


def layout_of(text: str) -> Layout:
    """The layout that ``str`` wrote. Raises ValueError for text that is none."""
    if text == "single":
        return Layout()
    sizes: dict[str, int] = {}
    for part in text.split(" x "):
        match = re.fullmatch(r"([a-z_]+)(\d+)", part)
        if match is None or match[1] not in AXES:
            raise ValueError(f"{text!r} is no layout; one looks like pp2 x dp_shard4")
        sizes[match[1]] = int(match[2])
    return Layout(**sizes)


def calibrate(
    job: Job, steps: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]], accelerator: Accelerator
) -> Calibration:
    """``accelerator`` as the run of ``job`` found it. Raises NothingToLearn.

    ``steps`` and ``ledger`` are lines of the run's ``steps.jsonl`` and ``ledger.jsonl``.
    """
    measured = measured_steps(steps)
    if not measured:
        raise NothingToLearn(
            f"{len(steps)} finished steps, and in no layout {FEWEST} beyond the first {WARM_UP} of a generation; "
            "let the job run longer"
        )
    fit = _Fit(job, measured, accelerator)
    efficiency, links = fit.one_layout() if len(measured) == 1 else fit.several()
    chosen = fit.with_(efficiency, links)
    accounts = [line["goodput"] for line in ledger if line.get("event") == "time_account" and "goodput" in line]
    return Calibration(
        chosen,
        tuple((each, step_time(job, each.layout, chosen).total) for each in measured),
        accounts[-1] if accounts else None,
        links,
    )


class _Fit:
    def __init__(self, job: Job, measured: Sequence[Measured], accelerator: Accelerator) -> None:
        self._job, self._measured, self._accelerator = job, measured, accelerator

    def with_(self, efficiency: float, links: float) -> Accelerator:
        known = self._accelerator
        return replace(
            known,
            efficiency=efficiency,
            link_bytes_per_second=known.link_bytes_per_second * links,
            network_bytes_per_second=known.network_bytes_per_second * links,
            link_latency_seconds=known.link_latency_seconds / links,
            network_latency_seconds=known.network_latency_seconds / links,
            exchange_seconds=known.exchange_seconds / links,
            block_seconds=known.block_seconds * known.efficiency / efficiency,
        )

    def one_layout(self) -> tuple[float, float]:
        """Efficiency alone, or, where no efficiency explains the step, the links as well."""
        (only,) = self._measured

        def predicted(efficiency: float, links: float = 1.0) -> float:
            return step_time(self._job, only.layout, self.with_(efficiency, links)).total

        if predicted(_EFFICIENCIES[1]) > only.seconds:
            return _EFFICIENCIES[1], _falling(lambda links: predicted(_EFFICIENCIES[1], links), only.seconds, _LINKS)
        return _falling(predicted, only.seconds, _EFFICIENCIES), 1.0

    def several(self) -> tuple[float, float]:
        """Least squares of the logarithms, weighted by the steps, on a grid that is drawn ever finer."""
        bounds = [tuple(map(math.log, limits)) for limits in (_EFFICIENCIES, _LINKS)]
        centre = [sum(limits) / 2 for limits in bounds]
        reach = [(limits[1] - limits[0]) / 2 for limits in bounds]
        for _ in range(_ROUNDS):
            axes = [
                [min(max(middle + width * (2 * i / (_GRID - 1) - 1), low), high) for i in range(_GRID)]
                for middle, width, (low, high) in zip(centre, reach, bounds, strict=True)
            ]
            points = [(efficiency, links) for efficiency in axes[0] for links in axes[1]]
            centre = list(min(points, key=lambda point: self._misfit(*point)))
            reach = [width / 3 for width in reach]
        return math.exp(centre[0]), math.exp(centre[1])

    def _misfit(self, efficiency: float, links: float) -> float:
        """Of logarithms of both."""
        chosen = self.with_(math.exp(efficiency), math.exp(links))
        return sum(
            each.steps * math.log(step_time(self._job, each.layout, chosen).total / each.seconds) ** 2
            for each in self._measured
        )


def _falling(function: Callable[[float], float], value: float, limits: tuple[float, float]) -> float:
    """Where a falling function of a positive number has ``value``, or the limit that comes nearest."""
    low, high = map(math.log, limits)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(math.exp(middle)) > value else (low, middle)
    return math.exp(high)
