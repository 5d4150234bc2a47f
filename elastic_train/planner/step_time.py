"""How long a step takes: compute, the exchanges that nothing hides, the pipeline's bubble, and the update.

What is assumed, and nothing else:

- Products run at ``efficiency`` times the peak of their precision, a fixed share per accelerator, or as fast as memory
  brings what they read (``planner.compute_time``). fp8 is for the products of the blocks' projections only.
- Links, network and memory reach ``transfer_efficiency`` of their bandwidth.
- Exchanges that run beside compute (``Exchange.overlaps``) cost nothing as long as there is compute to hide them, but
  for the first or last unit; where the accelerator does not overlap (CPU) all of them cost.
- The update reads and writes its tensors once, at the speed of memory.
- A pipeline is as slow as its slowest rank; filling and draining it takes one pass of each other rank, divided by the
  stages per rank, and by 3 where the backward pass is split.
- ``hosts.threads`` of a CPU rank compute so many times as fast, as far as there are cores (``with_threads``).
- Ranks that share cores take turns: a step then takes as long as all their work together, or as the longest chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.flops import DAY, Utilisation, tokens_per_step, utilisation
from elastic_train.planner.hardware import Accelerator
from elastic_train.planner.rank_time import RankTime
from elastic_train.planner.traffic import telling_ranks

HOUR = 3600.0
"""seconds"""


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
    def idle(self) -> float:
        """Seconds of a step in which the rank has nothing to do."""
        return self.terms.get("bubble", 0.0)

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
    accelerator = accelerator.for_job(job, layout.world_size)
    reached = accelerator.efficiency if efficiency is None else efficiency
    times = {
        number: RankTime(job, layout, accelerator, reached, number, stages)
        for number, stages in telling_ranks(job, layout).items()
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


def _taking_turns(times: dict[int, RankTime], weights: dict[int, int], share: float, chain: float) -> dict[str, float]:
    """Terms of the mean rank, where ``share`` ranks use one core. ``chain``: seconds with a core for each."""
    terms: dict[str, float] = {}
    for number, rank in times.items():
        for name, seconds in rank.terms.items():
            terms[name] = terms.get(name, 0.0) + seconds * share * weights[number] / sum(weights.values())
    idle = chain - sum(terms.values())
    return terms | ({"bubble": idle} if idle > 0 and len(times) > 1 else {})
