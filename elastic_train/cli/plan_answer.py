"""The answer of ``elastic-train plan``, before it is written in one way or another: terminal, JSON, HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.cli.plan_question import Question
    from elastic_train.cli.prices import Price
    from elastic_train.planner.exchange import Exchange
    from elastic_train.planner.memory import RankMemory
    from elastic_train.planner.ranking import Candidate, Ranking


@dataclass(frozen=True, slots=True)
class Sent:
    """Exchanges of one kind in a step, of the pipeline rank that sends most."""

    exchange: Exchange
    seconds: float
    """of all of them, hidden or not"""


@dataclass(frozen=True, slots=True)
class Priced:
    """A layout with what the whole training takes. ``cost``: None without a price."""

    candidate: Candidate
    memory: tuple[RankMemory, ...]
    """one per pipeline rank"""
    memory_limit: int
    host_bytes: int
    """of CPU memory on a node, for offloaded state; 0 without"""
    days: float
    cost: float | None
    currency: str
    reasons: list[str]
    state: dict[str, float]
    """bytes of model state by accounting: ``textbook``, and ``engine``, of this engine's fullest rank"""
    state_formula: str
    """of the textbook"""
    traffic: list[Sent]


@dataclass(frozen=True, slots=True)
class Answer:
    """``work``: FLOPs per token by way of counting; ``calibration``: sentences about a run that was read."""

    question: Question
    ranking: Ranking
    priced: list[Priced]
    work: dict[str, float]
    calibration: list[str]
    as_is: str | None
    """what a job file does as it is, where ``train`` takes defaults for what the search chooses; None: no job file"""


def answer_of(question: Question, top: int, price: Price | None, calibration: list[str]) -> Answer:
    """Search, and price what is found. Raises UserError with the nearest possible answer when there is none."""
    from elastic_train.planner.flops import model_flops_per_token
    from elastic_train.planner.impossible import why_impossible
    from elastic_train.planner.search import rank_layouts

    job, limit = question.job, question.memory_limit
    try:
        question.accelerator.peak(job.training.precision)
    except ValueError as error:
        raise UserError(f"training.precision={job.training.precision}: {error}") from None
    ranking = rank_layouts(job, question.gpus, question.accelerator, limit, top)
    if not ranking.best:
        raise UserError(why_impossible(job, question.gpus, question.accelerator, limit, ranking))
    work = {
        # Of frozen weights the backward pass has one product, not two.
        "6P" if job.lora is None else "4P": (6.0 if job.lora is None else 4.0) * job.model.num_parameters,
        "full": model_flops_per_token(job, "full"),
        "causal": model_flops_per_token(job, "causal"),
    }
    return Answer(
        question,
        ranking,
        [_priced(question, ranking, plan, price) for plan in ranking.best],
        work,
        calibration,
        _as_is(question, ranking) if question.from_file else None,
    )


def _as_is(question: Question, ranking: Ranking) -> str:
    """The layout that ``train`` would choose for the file, with the file's own options and defaults."""
    from elastic_train.config.sizes import gib
    from elastic_train.planner.layouts import NoLayout, choose_layout
    from elastic_train.planner.machines import Machine
    from elastic_train.planner.memory import fullest_rank
    from elastic_train.planner.ranking import Candidate
    from elastic_train.planner.step_time import step_time

    job, each = question.job, question.accelerator.per_node
    nodes = [each] * (question.gpus // each) + ([question.gpus % each] if question.gpus % each else [])
    try:
        machine = Machine(question.accelerator, question.memory_limit) if job.hosts.device == "cuda" else None
        layout = choose_layout(job, nodes, most=job.hosts.max, machine=machine).layout
    except NoLayout as error:
        return f"as the file is: {error}"
    plan = Candidate(job, layout, fullest_rank(job, layout), step_time(job, layout, question.accelerator))
    options = ", ".join(f"{name}={str(value).lower()}" for name, value in plan.options.items())
    slower = plan.time.total / ranking.best[0].time.total - 1
    compared = f"{slower:.1%} slower than #1" if slower > 0 else "no slower than #1"
    fits = "" if plan.fullest.total <= question.memory_limit else ", which does not fit"
    return (
        f"as the file is, train runs {layout} ({options}): {gib(plan.fullest.total)} of "
        f"{gib(question.memory_limit)}{fits}; {plan.time.total:.4g} s a step, {compared}"
    )


def _priced(question: Question, ranking: Ranking, plan: Candidate, price: Price | None) -> Priced:
    from elastic_train.planner.host_memory import node_bytes
    from elastic_train.planner.memory import memory_of
    from elastic_train.planner.reasons import reasons

    memory = memory_of(plan.job, plan.layout)
    return Priced(
        plan,
        memory,
        question.memory_limit,
        node_bytes(plan.job, plan.layout, question.accelerator.per_node),
        plan.time.days(question.tokens),
        None if price is None else plan.time.cost(question.tokens, price.per_hour, question.gpus),
        "" if price is None else price.currency,
        reasons(plan, ranking, question.gpus, question.memory_limit),
        *_state(plan, memory),
        _traffic(question, plan),
    )


def _traffic(question: Question, plan: Candidate) -> list[Sent]:
    from elastic_train.planner.traffic import traffic_of
    from elastic_train.planner.transfer import transfer_seconds

    found = traffic_of(plan.job, plan.layout)
    return [Sent(each, transfer_seconds(each, plan.layout, question.accelerator)) for each in found]


def _state(plan: Candidate, memory: tuple[RankMemory, ...]) -> tuple[dict[str, float], str]:
    """Weights, gradients and optimizer state, by both accountings, and the textbook's formula."""
    from elastic_train.planner.parameters import adapter_elements
    from elastic_train.planner.textbook import textbook_formula, textbook_state

    layout, job, strategy = plan.layout, plan.job, plan.job.parallel.data
    ways = layout.tp * layout.pp
    trained = adapter_elements(job.model, job.lora) if job.lora else job.model.num_parameters
    divided = sum(textbook_state(trained / ways, strategy, layout.shards).values())
    formula = f"{textbook_formula(strategy)}, P = parameters / (tp x pp), N = {layout.shards}"
    if job.lora is not None:
        shared = strategy in ("zero3", "hsdp")
        divided += 2 * job.model.num_parameters / ways / (layout.shards if shared else 1)
        formula = f"{'2F/N' if shared else '2F'} + {formula} of adapters, F = the others / (tp x pp)"
    engine = float(max(sum(rank.state.values()) for rank in memory))
    return {"textbook": divided, "engine": engine}, formula
