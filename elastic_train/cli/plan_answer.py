"""The answer of ``elastic-train plan``, before it is written in one way or another: terminal, JSON, HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.cli.plan_question import Question
    from elastic_train.cli.prices import Price
    from elastic_train.planner.memory import RankMemory
    from elastic_train.planner.search import Candidate, Ranking


@dataclass(frozen=True, slots=True)
class Priced:
    """A layout with what the whole training takes. ``cost``: None without a price."""

    candidate: Candidate
    memory: tuple[RankMemory, ...]
    """one per pipeline rank"""
    memory_limit: int
    days: float
    cost: float | None
    currency: str
    reasons: list[str]
    state: dict[str, float]
    """bytes of model state by accounting: the textbook's, and this engine's fullest rank"""


@dataclass(frozen=True, slots=True)
class Answer:
    """``work``: FLOPs per token by way of counting; ``calibration``: sentences about a run that was read."""

    question: Question
    ranking: Ranking
    priced: list[Priced]
    work: dict[str, float]
    calibration: list[str]


def answer_of(question: Question, top: int, price: Price | None, calibration: list[str]) -> Answer:
    """Search, and price what is found. Raises UserError with the nearest possible answer when there is none."""
    from elastic_train.planner.flops import model_flops_per_token
    from elastic_train.planner.impossible import why_impossible
    from elastic_train.planner.search import rank_layouts

    job, limit = question.job, question.memory_limit
    if job.parallel.offload:
        raise UserError(
            "parallel.offload=true: the model of time has no copies between CPU and accelerator, no update on the CPU; "
            "plan with parallel.offload=false"
        )
    try:
        question.accelerator.peak(job.training.precision)
    except ValueError as error:
        raise UserError(f"training.precision={job.training.precision}: {error}") from None
    ranking = rank_layouts(job, question.gpus, question.accelerator, limit, top)
    if not ranking.best:
        raise UserError(why_impossible(job, question.gpus, question.accelerator, limit, ranking))
    work = {
        "6P": 6.0 * job.model.num_parameters,
        "full": model_flops_per_token(job, "full"),
        "causal": model_flops_per_token(job, "causal"),
    }
    return Answer(
        question, ranking, [_priced(question, ranking, plan, price) for plan in ranking.best], work, calibration
    )


def _priced(question: Question, ranking: Ranking, plan: Candidate, price: Price | None) -> Priced:
    from elastic_train.planner.memory import memory_of
    from elastic_train.planner.reasons import reasons

    memory = memory_of(plan.job, plan.layout)
    return Priced(
        plan,
        memory,
        question.memory_limit,
        plan.time.days(question.tokens),
        None if price is None else plan.time.cost(question.tokens, price.per_hour, question.gpus),
        "" if price is None else price.currency,
        reasons(plan, ranking, question.gpus, question.memory_limit),
        _state(plan, memory),
    )


def _state(plan: Candidate, memory: tuple[RankMemory, ...]) -> dict[str, float]:
    """Weights, gradients and optimizer state, by both accountings."""
    from elastic_train.planner.textbook import textbook_formula, textbook_state

    layout, strategy = plan.layout, plan.job.parallel.data
    each = plan.job.model.num_parameters / (layout.tp * layout.pp)
    divided = sum(textbook_state(each, strategy, layout.shards).values())
    name = f"textbook ({textbook_formula(strategy)}, P = parameters / (tp x pp), N = {layout.shards})"
    return {name: divided, "this engine, fullest rank": float(max(sum(rank.state.values()) for rank in memory))}
