"""What failures and saves cost in seconds: the one table of defaults, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic_train.config.faults import Kind
from elastic_train.config.operation import FailureConfig
from elastic_train.config.time_causes import Cause


@dataclass(frozen=True, slots=True)
class Pause:
    """The parts of a pause in seconds, by the ledger's names; ``first_step`` is what that takes beyond a usual one."""

    detection: float = 0.0
    teardown: float = 0.0
    form: float = 0.0
    restore: float = 0.0
    first_step: float = 0.0

    @property
    def total(self) -> float:
        return self.detection + self.teardown + self.form + self.restore + self.first_step

    def parts(self) -> tuple[tuple[Cause, float], ...]:
        """In their order."""
        return (
            (Cause.DETECTION, self.detection),
            (Cause.TEARDOWN, self.teardown),
            (Cause.FORM, self.form),
            (Cause.RESTORE, self.restore),
            (Cause.FIRST_STEP, self.first_step),
        )

    def scaled(self, total: float) -> Pause:
        """The same proportions with another sum."""
        if self.total == 0:
            return Pause(detection=total)
        factor = total / self.total
        return Pause(*(seconds * factor for _, seconds in self.parts()))


MEASURED: Mapping[Kind, Pause] = {
    Kind.KILL_TRAINER: Pause(0.00, 0.05, 0.18, 0.02, 0.12),
    Kind.HANG: Pause(0.07, 0.05, 0.21, 0.02, 0.13),
    Kind.KILL_HOST: Pause(0.00, 0.06, 0.07, 0.03, 0.22),
    Kind.KILL_NODE: Pause(0.00, 0.05, 0.06, 0.03, 0.00),
    Kind.DRAIN: Pause(0.00, 0.04, 0.12, 0.08, 0.25),
    Kind.PARTITION: Pause(0.11, 0.07, 0.13, 0.08, 0.05),
}
"""This engine's, docs/benchmarks.md "Recovery" (5 M parameters, 4 hosts, 2 cores): medians, less a steady step.

The detection of a hang and of a partition is beyond ``failure.hang_seconds`` and ``failure.lease_seconds``, which
:func:`elastic` adds. A killed coordinator and an outage of storage pause no step.
"""
GROWTH = MEASURED[Kind.DRAIN]
"""Taking hosts in is the same work between two steps."""
RESTORE_SECONDS_PER_HOST = 0.002
"""The coordinator's answers to the ranks, docs/benchmarks.md "Control plane"."""
RESTART = Pause(120.0, 60.0, 240.0, 120.0, 60.0)
"""A restart of the whole job. 10 minutes in all: MegaScale (arXiv:2402.15627, section 4) reports less than that for
detection and diagnosis on 10,000 GPUs; how it is divided is assumed."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What interrupts a job for how long. A kind of failure that is not in ``pauses`` interrupts nothing."""

    pauses: Mapping[Kind, Pause]
    growth: Pause = GROWTH
    per_host: float = RESTORE_SECONDS_PER_HOST
    """seconds per host that takes part, added to ``restore``"""
    load: float = 0.0
    """seconds that reading a checkpoint from storage takes beyond reading from memory"""
    pauses_to_grow: bool = True
    """hosts that come are taken in at once; otherwise when the next failure interrupts the job anyway"""

    def of(self, kind: Kind | None, hosts: int, *, from_storage: bool) -> Pause:
        """The pause after a failure of ``kind`` (None: to take hosts in) in which ``hosts`` take part."""
        pause = self.growth if kind is None else self.pauses[kind]
        return replace(pause, restore=pause.restore + self.per_host * hosts + (self.load if from_storage else 0.0))


def elastic(failure: FailureConfig | None = None, load: float = 0.0) -> Costs:
    """This engine's costs; ``failure``: of a job file, default: what that has by default. ``load``: as of ``Costs``."""
    failure = failure or FailureConfig()
    waits = {Kind.HANG: failure.hang_seconds, Kind.PARTITION: failure.lease_seconds}
    pauses = {
        kind: replace(pause, detection=pause.detection + waits.get(kind, 0.0)) for kind, pause in MEASURED.items()
    }
    return Costs(pauses, load=load)


def restarts(pause: Pause = RESTART) -> Costs:
    """Of a job whose processes all start again after every interruption, whatever its kind."""
    return Costs(dict.fromkeys(Kind, pause), growth=pause, per_host=0.0, pauses_to_grow=False)


@dataclass(frozen=True, slots=True)
class Saves:
    """Checkpoints in storage.

    Attributes:
        every: seconds of work between two, in whole steps.
        stall: seconds that the job stands still for one. This engine's is none: a step waits 0.02 ms for its snapshot
            (docs/benchmarks.md "Checkpoints"), and hosts upload from memory.
        seconds: from the beginning of one until it is committed, at least ``stall``.
    """

    every: float = 600.0
    stall: float = 0.0
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where a lost state is found again.

    Attributes:
        memory: of the node (tier 0): what a lost trainer or host had; otherwise each interruption goes to storage.
        partners: copies on other nodes (tier 1): what a lost node had, unless they are lost with it.
    """

    memory: bool = True
    partners: int = 1


@dataclass(frozen=True, slots=True)
class Pace:
    """A step of the full job in seconds, and the shares of it (by cause) that are not computing, as data_wait."""

    step: float = 10.0
    beside: Mapping[Cause, float] = field(default_factory=dict)
