"""The options of ``elastic-train simulate``, and what cannot be asked with them."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from elastic_train.cli.durations import parse_duration
from elastic_train.cli.guard import UserError
from elastic_train.planner.simulation.repair import Repair, Shape

_LEAST = {"nodes": 1, "gpus_per_node": 1, "spares": 0, "unit_nodes": 1, "min_nodes": 1, "runs": 1, "rack_nodes": 0}
_LEAST |= {"partners": 0, "checkpoint_stall": 0}
_SOURCES = ("mtbf_hours", "rack_nodes", "rack_mtbf_hours", "spot")
RECOVERIES = ("elastic", "restart", "both")
RUNS = 20
STEP, REPLACE = 10.0, "1h"
"""Assumed where nobody says more; seconds of a step."""
_SIGMA = 3.0
"""The largest of a lognormal: beyond, the mean is that of a few draws that most runs never see."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options; None: not given. Times in seconds unless the name says otherwise."""

    job: str | None = None
    like: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    mtbf_hours: float | None = None
    days: float | None = None
    spares: int | None = None
    unit_nodes: int | None = None
    min_nodes: int | None = None
    step: float | None = None
    checkpoint_every: float | None = None
    checkpoint_size: str | None = None
    storage_write: str | None = None
    storage_read: str | None = None
    checkpoint_takes: float | None = None
    checkpoint_stall: float | None = None
    partners: int | None = None
    failures: str = "exponential"
    rack_nodes: int = 0
    rack_mtbf_hours: float | None = None
    spot: str | None = None
    notice: float = 120.0
    replace: str | None = None
    recovery: str | None = None
    pause: float | None = None
    seed: int = 1
    runs: int | None = None


def option(name: str) -> str:
    """As the command line has it."""
    return f"--{name.replace('_', '-')}"


def check_asked(asked: Asked) -> None:
    """After defaults are filled in. Raises UserError."""
    if asked.nodes is None:
        raise UserError("give a cluster: --nodes, a job file, --like llama3, or --from JOB for a run of yours")
    for name, bound in _LEAST.items():
        value = getattr(asked, name)
        if value is not None and not value >= bound:
            raise UserError(f"{option(name)}={value}: must be at least {bound}")
    for name in ("mtbf_hours", "rack_mtbf_hours", "days"):
        value = getattr(asked, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{option(name)}={value:g}: must be a number above 0")
    if asked.recovery not in (None, *RECOVERIES):
        raise UserError(f"--recovery={asked.recovery}: must be one of {', '.join(RECOVERIES)}")
    if bool(asked.rack_nodes) != (asked.rack_mtbf_hours is not None):
        raise UserError("--rack-nodes and --rack-mtbf-hours belong together: how many nodes fail at once, how often")
    _check_replicas(asked, asked.nodes)
    _check_checkpoints(asked)


def _check_replicas(asked: Asked, nodes: int) -> None:
    for name in ("unit_nodes", "min_nodes"):
        value = getattr(asked, name)
        if asked.job is not None and value is not None:
            raise UserError(f"{option(name)}: {asked.job} says that itself, by parallel and hosts.min")
        if value is not None and value > nodes and asked.like is None:
            raise UserError(f"{option(name)}={value}: must be at most --nodes={nodes}")
    unit = asked.unit_nodes or 1
    if nodes % unit:
        whole, of = nodes // unit * unit, f", as of --like={asked.like}," if asked.like else ""
        raise UserError(
            f"--nodes={nodes}: only whole replicas of --unit-nodes={unit}{of} work; give "
            + (f"{whole} or {whole + unit}" if whole else f"{unit}")
        )


def _check_checkpoints(asked: Asked) -> None:
    stall, takes = asked.checkpoint_stall, asked.checkpoint_takes
    if stall is not None and takes is not None and stall > takes:
        raise UserError(f"--checkpoint-stall={stall:g}s: must be at most --checkpoint-takes={takes:g}s")


def repair_of(asked: Asked) -> Repair:
    """What ``--replace`` says. Raises UserError."""
    text = asked.replace or REPLACE
    shape, _, rest = text.rpartition(":") if text.count(":") < 2 else text.partition(":")
    mean, _, sigma = rest.partition(":")
    try:
        if shape in ("", Shape.EXPONENTIAL.value) and not sigma:
            return Repair(parse_duration(mean), Shape(shape or Shape.FIXED))
        if shape == Shape.LOGNORMAL and 0 < (spread := float(sigma)) <= _SIGMA:
            return Repair(parse_duration(mean), Shape.LOGNORMAL, spread)
    except (typer.BadParameter, ValueError):
        pass
    raise UserError(
        f"--replace={text}: must be a duration as 1h, exponential:MEAN or lognormal:MEAN:SIGMA, as lognormal:2h:1.0 "
        f"with a standard deviation of the logarithm up to {_SIGMA:g}"
    )


def check_beside_trace(asked: Asked) -> None:
    """A trace holds all failures of the one run. Raises UserError for what would be left out."""
    for name in _SOURCES:
        if getattr(asked, name):
            raise UserError(f"{option(name)}: all failures are those of {asked.failures}; give only one of them")
    if asked.runs not in (None, 1):
        raise UserError(f"--runs={asked.runs}: {asked.failures} is one run; leave it out")
