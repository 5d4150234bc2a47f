"""Why a layout is where it is in a ranking: sentences with both numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_train.config.sizes import gib
from elastic_train.planner.constraints import violated
from elastic_train.planner.memory import memory_bytes
from elastic_train.planner.ranking import Candidate, Ranking

TIGHT = 0.95
"""Above this share of the limit fragmentation or a larger workspace may be too much."""
_WORTH_TELLING = 0.005
"""Smaller shares of a step are left out."""


def reasons(plan: Candidate, ranking: Ranking, gpus: int, limit: int) -> list[str]:
    """Of the first one what its step is made of and what its options avoid; of others what costs them their place.

    ``gpus``: those that were asked about; ``limit``: bytes of one.
    """
    first = ranking.best[0]
    tight = [f"tight: {share:.1%} of its memory"] if (share := plan.fullest.total / limit) > TIGHT else []
    if plan is not first:
        return [_behind(plan, first), *tight]
    terms = sorted(plan.time.terms.items(), key=lambda item: -item[1])
    shares = [f"{name} {part:.0%}" for name, seconds in terms if (part := seconds / plan.time.total) > _WORTH_TELLING]
    idle = gpus - plan.layout.world_size
    stay = "1 GPU stays idle" if idle == 1 else f"{idle:,} GPUs stay idle"
    unused = [f"{stay}: of the layouts that the question allows none that uses more is faster"] if idle else []
    return [f"of its step {', '.join(shares)}", *_avoided(plan, limit), *tight, *unused]


def _behind(plan: Candidate, first: Candidate) -> str:
    slower = plan.time.total / first.time.total - 1
    if slower < _WORTH_TELLING / 10:
        return "as fast as #1"
    mine, best = plan.time.terms, first.time.terms
    more = {name: mine.get(name, 0.0) - best.get(name, 0.0) for name in dict.fromkeys([*mine, *best])}
    name = max(more, key=lambda term: more[term])
    return f"{slower:.1%} slower than #1, most of it by {name} ({more[name]:+.3g} s a step)"


def _avoided(plan: Candidate, limit: int) -> Iterator[str]:
    """What its layout would need with less recomputation, or without releasing weights."""
    training, parallel = plan.job.training, plan.job.parallel
    cheaper: dict[str, dict[str, dict[str, Any]]] = {}
    if training.recompute != "none":
        cheaper["recompute=none"] = {"training": {"recompute": "none"}}
    if parallel.reshard_after_forward:
        cheaper["reshard_after_forward=false"] = {"parallel": {"reshard_after_forward": False}}
    for text, changes in cheaper.items():
        update = {section: getattr(plan.job, section).model_copy(update=values) for section, values in changes.items()}
        other = plan.job.model_copy(update=update)
        if violated(other, plan.layout) is None and (needed := memory_bytes(other, plan.layout)) > limit:
            yield f"with {text} it would need {gib(needed)} of {gib(limit)}"
