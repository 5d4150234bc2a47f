"""How long a step takes: compute, the exchanges that nothing hides, the pipeline's bubble, and the update.

What is assumed, and nothing else:

- Operations run at ``efficiency`` times the peak of their precision, a fixed share per accelerator; attention is
  causal, or in full where documents are separated by a mask. fp8 is for the products of the blocks' projections only.
- Links, network and memory reach ``transfer_efficiency`` of their bandwidth.
- Exchanges that run beside compute (``Exchange.overlaps``) cost nothing as long as there is compute to hide them, but
  for the first or last unit; where the accelerator does not overlap (CPU) all of them cost.
- The update reads and writes its tensors once, at the speed of memory.
- A pipeline is as slow as its slowest rank; filling and draining it takes one pass of each other rank, divided by the
  stages per rank, and by 3 where the backward pass is split.
- Ranks that share cores take turns: a step then takes as long as all their work together, or as the longest chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.exchange import Exchange
from elastic_train.planner.flops import (
    DAY,
    Utilisation,
    computed_attention,
    forward_flops,
    tokens_per_step,
    utilisation,
)
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.parameters import StageParameters
from elastic_train.planner.traffic import rank_traffic, telling_ranks
from elastic_train.planner.transfer import transfer_seconds
from elastic_train.planner.update_time import update_seconds

HOUR = 3600.0
"""seconds"""
_EXCHANGES = {
    "tp": "tensor parallel exchanges",
    "cp": "context parallel exchanges",
    "pp": "pipeline sends",
    "stage": "matrices exchanged",
    "world": "loss and norm",
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """``terms``: seconds by what they are spent on, which add up to ``total``. ``hidden``: exchanges beside compute."""

    terms: dict[str, float]
    hidden: dict[str, float]
    exposed: float
    """seconds in which exchanges are waited for"""
    bubble: float
    """share of the step in which the rank has nothing to do"""
    tokens_per_second: float
    use: Utilisation

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.terms.values())

    @property
    def mfu(self) -> float:
        """Of the peak, with attention counted in full, as published figures count."""
        return self.use.mfu

    def days(self, tokens: float) -> float:
        """To train on so many tokens, without interruptions."""
        return tokens / self.tokens_per_second / DAY

    def cost(self, tokens: float, price_per_hour: float, paid: int) -> float:
        """Of training on so many tokens; ``price_per_hour``: of one of ``paid`` accelerators, idle or not."""
        return tokens / self.tokens_per_second / HOUR * paid * price_per_hour


def step_time(job: Job, layout: Layout, accelerator: Accelerator, efficiency: float | None = None) -> StepTime:
    """Of a step of ``job`` in ``layout``. ``efficiency``: in place of the accelerator's.

    Raises ValueError for a precision that the accelerator does not compute in.
    """
    rates = _Rates(job, accelerator, accelerator.efficiency if efficiency is None else efficiency)
    times = {
        number: _RankTime(job, layout, rates, number, stages) for number, stages in telling_ranks(job, layout).items()
    }
    weights = {number: layout.pp - len(times) + 1 if 0 < number < layout.pp - 1 else 1 for number in times}
    slowest = max(times.values(), key=lambda rank: sum(rank.terms.values()))
    fill = sum(times[number].micro_batch * weights[number] for number in times) - slowest.micro_batch
    fill /= job.parallel.stages_per_rank * (3 if job.parallel.splits_backward else 1)
    share = accelerator.sharing(layout.world_size)
    terms = slowest.terms | ({"bubble": fill} if layout.pp > 1 else {})
    if share > 1:
        terms = _taking_turns(times, weights, share, sum(terms.values()))
    seconds = sum(terms.values())
    return StepTime(
        terms,
        slowest.hidden,
        sum(terms.get(name, 0.0) for name in slowest.exchanged),
        terms.get("bubble", 0.0) / seconds,
        tokens_per_step(job) / seconds,
        utilisation(job, layout, seconds=seconds, peak=accelerator.peak(job.training.precision) / share),
    )


def _taking_turns(times: dict[int, _RankTime], weights: dict[int, int], share: float, chain: float) -> dict[str, float]:
    """Terms of the mean rank, where ``share`` ranks use one core. ``chain``: seconds with a core for each."""
    terms: dict[str, float] = {}
    for number, rank in times.items():
        for name, seconds in rank.terms.items():
            terms[name] = terms.get(name, 0.0) + seconds * share * weights[number] / sum(weights.values())
    idle = chain - sum(terms.values())
    return terms | ({"bubble": idle} if idle > 0 and len(times) > 1 else {})


@dataclass(frozen=True)
class _Rates:
    """Seconds per token that a block, and the head, take on one rank, before they are cut over ranks."""

    job: Job
    accelerator: Accelerator
    efficiency: float

    @cached_property
    def seconds(self) -> tuple[float, float, float]:
        """Forward pass of a block, what recomputation adds to its backward pass, forward pass of the head.

        The backward pass is two forward ones, and the scores of attention once more.
        """
        job = self.job
        flops, layers = (
            forward_flops(job.model, job.data.sequence_length, computed_attention(job)),
            job.model.num_hidden_layers,
        )
        precision = job.training.precision
        fast = self.accelerator.peak(precision) * self.efficiency
        fast *= self.accelerator.fp8_share if precision == "fp8" else 1.0
        plain = self.accelerator.peak("bf16" if precision == "fp8" else precision) * self.efficiency
        attention = flops.attention / plain
        again = {
            "none": 0.0,
            "selective": attention,
            "full": (flops.projections + flops.feed_forward * 2 / 3) / fast + attention,
        }
        forward = (flops.projections + flops.feed_forward) / fast + attention
        recomputed = again[job.training.recompute]
        return forward / layers, (recomputed + attention / 2) / layers, flops.head / plain


class _RankTime:
    """One pipeline rank, with a core or an accelerator of its own."""

    def __init__(self, job: Job, layout: Layout, rates: _Rates, number: int, stages: list[StageParameters]) -> None:
        self.terms: dict[str, float] = {}
        self.hidden: dict[str, float] = {}
        count = micro_batches_per_rank(job, layout)
        blocks, heads = sum(stage.blocks for stage in stages), sum(stage.last for stage in stages)
        block, again, head = rates.seconds
        tokens = job.training.micro_batch * job.data.sequence_length / (layout.cp * layout.tp)
        extra = blocks * rates.accelerator.block_seconds
        forward = tokens * (blocks * block + heads * head)
        recomputed = tokens * blocks * again
        self.terms = {"forward": count * forward, "backward": 2 * count * forward, "recomputation": count * recomputed}
        if extra:
            self.terms["blocks, whatever their size"] = count * extra * (3 if job.training.recompute == "full" else 2)
        hiding = _Hiding(forward, 2 * forward + recomputed, count, rates.accelerator.overlaps)
        self.exchanged: set[str] = set()
        exchanges = rank_traffic(job, layout, number, stages)
        for each in exchanges:
            seconds = transfer_seconds(each, layout, rates.accelerator)
            self._add(each, seconds, hiding.exposed(each, seconds))
        self.micro_batch = self._per_micro_batch(count)
        self.terms["update"] = update_seconds(job, layout, stages, rates.accelerator, rates.efficiency)

    def _add(self, each: Exchange, seconds: float, exposed: float) -> None:
        name = _term(each)
        self.exchanged.add(name)
        self.terms[name] = self.terms.get(name, 0.0) + exposed
        if seconds > exposed:
            self.hidden[each.what] = self.hidden.get(each.what, 0.0) + seconds - exposed

    def _per_micro_batch(self, count: int) -> float:
        """Seconds from one micro-batch to the next: what is spent on state comes once a step."""
        once = ("weights gathered", "gradients reduced", "loss and norm", "matrices exchanged")
        return sum(seconds for name, seconds in self.terms.items() if name not in once) / count


def _term(each: Exchange) -> str:
    if each.what == "valid tokens":
        return _EXCHANGES["world"]
    if each.axis in _EXCHANGES:
        return _EXCHANGES[each.axis]
    return "weights gathered" if each.collective == "all_gather" else "gradients reduced"


class _Hiding:
    """Compute beside which exchanges can run, used up as they come."""

    def __init__(self, forward: float, backward: float, count: int, overlaps: bool) -> None:
        self._overlaps = overlaps
        passes = count * (forward + backward)
        self._left = {
            "first forward": forward,
            "last backward": backward,
            "backwards": count * backward,
            "passes": passes,
        }

    def exposed(self, each: Exchange, seconds: float) -> float:
        """Seconds of an exchange that compute waits for."""
        if not self._overlaps or each.overlaps == "nothing":
            return seconds
        first = 0.0 if each.overlaps == "other passes" else seconds / max(1, each.units)
        window = each.overlaps if each.overlaps in self._left else "passes"
        hidden = min(seconds - first, self._left[window], self._left["passes"])
        self._left[window] -= hidden
        if window != "passes":
            self._left["passes"] -= hidden
        return seconds - hidden
