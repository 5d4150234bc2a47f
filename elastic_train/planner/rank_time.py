"""What one pipeline rank spends a step on, as if it had an accelerator of its own and never waited for other ranks.

A search asks for the same passes with many ways to share state, and the other way round. So what a rank computes and
exchanges in its passes is remembered apart from what it exchanges of state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.compute_time import pass_times
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.exchange import Exchange
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.parameters import StageParameters
from elastic_train.planner.traffic import pass_traffic, state_traffic
from elastic_train.planner.traffic_state import ACTIVE_STAGES
from elastic_train.planner.transfer import transfer_seconds
from elastic_train.planner.update_time import update_seconds

_EXCHANGES = {
    "tp": "tensor parallel exchanges",
    "cp": "context parallel exchanges",
    "pp": "pipeline sends",
    "ends": "pipeline sends",
    "stage": "matrices exchanged",
    "world": "loss and norm",
    "host": "copies from and to CPU memory",
}
_ONCE = (
    "weights gathered",
    "gradients reduced",
    "loss and norm",
    "matrices exchanged",
    "copies from and to CPU memory",
)
"""What is spent on state comes once a step."""


class RankTime:
    """``terms``: seconds by what they are spent on; ``exchanged``: those of them that are exchanges."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        accelerator: Accelerator,
        efficiency: float,
        number: int,
        stages: list[StageParameters],
    ) -> None:
        """Of pipeline rank ``number``, which holds ``stages``."""
        count = micro_batches_per_rank(job, layout)
        passes = _passes(_Asked(_pass_key(job, layout, count, number), job, layout, stages), accelerator, efficiency)
        state = _state(_Asked(_state_key(job, layout, count, number), job, layout, stages), accelerator, efficiency)
        account = passes.copy()
        account.add(state.exchanges, accelerator.overlaps)
        self.terms, self.hidden, self.exchanged = account.terms, account.hidden, account.exchanged
        self.micro_batch = sum(seconds for name, seconds in self.terms.items() if name not in _ONCE) / count
        """seconds from one micro-batch to the next"""
        self.terms["update"] = state.update


def waits_for_state(
    job: Job, layout: Layout, accelerator: Accelerator, efficiency: float, number: int, stages: list[StageParameters]
) -> float:
    """Seconds of a rank's step that no compute can hide: the update, and exchanges that nothing runs beside."""
    count = micro_batches_per_rank(job, layout)
    state = _state(_Asked(_state_key(job, layout, count, number), job, layout, stages), accelerator, efficiency)
    waited = (seconds for each, seconds, _ in state.exchanges if not accelerator.overlaps or each.overlaps == "nothing")
    return state.update + sum(waited)


_Timed = tuple[Exchange, float, str]
"""With its seconds, hidden or not, and the term that it belongs to."""


@dataclass(slots=True)
class _Account:
    """Seconds spent so far, and compute beside which exchanges can still run."""

    terms: dict[str, float]
    left: dict[str, float]
    hidden: dict[str, float] = field(default_factory=dict)
    exchanged: set[str] = field(default_factory=set)

    def copy(self) -> _Account:
        return _Account(self.terms.copy(), self.left.copy(), self.hidden.copy(), self.exchanged.copy())

    def add(self, exchanges: Iterable[_Timed], overlaps: bool) -> None:
        for each, seconds, name in exchanges:
            exposed = self._exposed(each, seconds) if overlaps else seconds
            self.exchanged.add(name)
            self.terms[name] = self.terms.get(name, 0.0) + exposed
            if seconds > exposed:
                self.hidden[each.what] = self.hidden.get(each.what, 0.0) + seconds - exposed

    def _exposed(self, each: Exchange, seconds: float) -> float:
        """Seconds of an exchange that compute waits for."""
        if each.overlaps == "nothing":
            return seconds
        first = 0.0 if each.overlaps == "other passes" else seconds / max(1, each.units)
        window = each.overlaps if each.overlaps in self.left else "passes"
        hidden = min(seconds - first, self.left[window], self.left["passes"])
        self.left[window] -= hidden
        if window != "passes":
            self.left["passes"] -= hidden
        return seconds - hidden


@dataclass(frozen=True, slots=True)
class _Asked:
    """Of one rank; ``key`` is all that the answer depends on."""

    key: tuple[Any, ...]
    job: Job = field(compare=False)
    layout: Layout = field(compare=False)
    stages: list[StageParameters] = field(compare=False)

    @property
    def count(self) -> int:
        """Micro-batches."""
        return int(self.key[0])

    @property
    def number(self) -> int:
        """Of the pipeline rank."""
        return int(self.key[1])


def _pass_key(job: Job, layout: Layout, count: int, number: int) -> tuple[Any, ...]:
    training, parallel, data = job.training, job.parallel, job.data
    options = training.micro_batch, training.recompute, training.precision, training.compile, parallel.context
    schedule = parallel.pipeline, parallel.virtual_stages, layout.pp, layout.world_size
    cut = layout.cp, layout.tp, data.sequence_length, data.separates_documents
    return count, number, job.model, job.lora, options, schedule, cut


def _state_key(job: Job, layout: Layout, count: int, number: int) -> tuple[Any, ...]:
    training, parallel, optimizer = job.training, job.parallel, job.optimizer
    strategy = parallel.data, parallel.reshard_after_forward, parallel.prefetch, parallel.offload
    schedule = parallel.pipeline, parallel.virtual_stages, job.data.sequence_length
    exact = training.slots if training.determinism == "exact" else 0
    numbers = training.precision, training.reduce_dtype, exact, training.ema_decay is None
    update = optimizer.name, not optimizer.momentum
    # Others exchange their state once a step, however many micro-batches there are.
    often = parallel.data == "zero2" or parallel.reshard_after_forward or parallel.stages_per_rank > ACTIVE_STAGES
    return count if often else 1, number, job.model, job.lora, layout, strategy, schedule, numbers, update


@lru_cache(maxsize=1 << 12)
def _passes(asked: _Asked, accelerator: Accelerator, efficiency: float) -> _Account:
    """Compute, and exchanges of activations. Not to be changed: it is remembered."""
    job, layout, stages, count = asked.job, asked.layout, asked.stages, asked.count
    blocks, heads = sum(stage.blocks for stage in stages), sum(stage.last for stage in stages)
    each = pass_times(job, layout, accelerator, efficiency)
    forward = blocks * each.forward + heads * each.head_forward
    backward = blocks * each.backward + heads * each.head_backward
    again = blocks * each.again
    terms = {"forward": count * forward, "backward": count * backward, "recomputation": count * again}
    if extra := blocks * accelerator.block_seconds:
        terms["blocks, whatever their size"] = count * extra * (3 if job.training.recompute == "full" else 2)
    left = {
        "first forward": forward,
        "last backward": backward + again,
        "backwards": count * (backward + again),
        "passes": count * (forward + backward + again),
    }
    account = _Account(terms, left)
    account.add(_timed(pass_traffic(job, layout, asked.number, stages), layout, accelerator), accelerator.overlaps)
    return account


@dataclass(frozen=True, slots=True)
class _State:
    exchanges: list[_Timed]
    update: float
    """seconds"""


@lru_cache(maxsize=1 << 12)
def _state(asked: _Asked, accelerator: Accelerator, efficiency: float) -> _State:
    """Exchanges and the update of the state."""
    job, layout, stages = asked.job, asked.layout, asked.stages
    exchanges = _timed(state_traffic(job, layout, asked.number, stages), layout, accelerator)
    return _State(exchanges, update_seconds(job, layout, stages, accelerator, efficiency))


def _timed(exchanges: Iterable[Exchange], layout: Layout, accelerator: Accelerator) -> list[_Timed]:
    return [(each, transfer_seconds(each, layout, accelerator), _term(each)) for each in exchanges]


def _term(each: Exchange) -> str:
    if each.what == "valid tokens":
        return _EXCHANGES["world"]
    if each.axis in _EXCHANGES:
        return _EXCHANGES[each.axis]
    return "weights gathered" if each.collective == "all_gather" else "gradients reduced"
