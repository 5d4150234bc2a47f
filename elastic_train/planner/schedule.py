"""What every pipeline rank does when: the orders that torch's schedules make, played through with costs per slot.

The orders are those of ``torch.distributed.pipelining`` 2.13, which ``parallel.pipeline`` runs (a test compares them);
this module imports no torch. F is a forward pass of a micro-batch through a stage, B the backward pass; where the
schedule splits it B makes the gradients of activations only, and W those of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from elastic_train.config.parallel import ParallelConfig

Kind = Literal["F", "B", "W"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
SPLIT = ("zero_bubble", "zbv")
"""Schedules whose backward pass comes in two parts."""


class Pass(NamedTuple):
    """One micro-batch through one stage, in one direction."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A pass and when it runs, in units of the costs that were given."""

    kind: Kind
    micro_batch: int
    stage: int
    start: float
    end: float


Cost = Callable[[Kind, int], float]
"""(kind, stage) -> duration of a pass."""


def equal_stages(name: str) -> Cost:
    """A forward pass takes 1, each of the two halves of a backward pass as much."""
    return lambda kind, stage: 1.0 if kind != "B" or name in SPLIT else 2.0


def schedule_order(name: str, pp: int, micro_batches: int, stages_per_rank: int = 1) -> list[list[Pass]]:
    """Passes of every pipeline rank in the order in which it runs them.

    Raises ValueError for a name that is unknown, or numbers that the schedule does not take.
    """
    _check(name, pp, micro_batches, stages_per_rank)
    if name == "gpipe":
        return [_gpipe(rank, micro_batches) for rank in range(pp)]
    if name == "1f1b":
        return [_one_forward_one_backward(rank, pp, micro_batches) for rank in range(pp)]
    if name == "zbv":
        return [_zbv(rank, pp, micro_batches) for rank in range(pp)]
    split = name == "zero_bubble"
    return [_interleaved(rank, pp, micro_batches, stages_per_rank, split) for rank in range(pp)]


def schedule_slots(
    name: str, pp: int, micro_batches: int, stages_per_rank: int = 1, cost: Cost | None = None
) -> list[list[Slot]]:
    """Slots of every pipeline rank. A pass starts when its rank is free and the pass that it needs has ended."""
    orders = schedule_order(name, pp, micro_batches, stages_per_rank)
    cost, last = cost or equal_stages(name), pp * stages_per_rank - 1
    ends: dict[Pass, float] = {}
    slots: list[list[Slot]] = [[] for _ in orders]
    free = [0.0] * pp
    while any(len(done) < len(order) for done, order in zip(slots, orders, strict=True)):
        before = len(ends)
        for rank, order in enumerate(orders):
            while len(slots[rank]) < len(order):
                step = order[len(slots[rank])]
                needed = _needed(step, last)
                if needed is not None and needed not in ends:
                    break
                start = max(free[rank], ends[needed] if needed is not None else 0.0)
                free[rank] = ends[step] = start + cost(step.kind, step.stage)
                slots[rank].append(Slot(step.kind, step.micro_batch, step.stage, start, free[rank]))
        if len(ends) == before:
            raise RuntimeError(f"schedule {name} of pp={pp}, {micro_batches} micro-batches waits for itself")
    return slots


def idle_share(slots: Sequence[Sequence[Slot]]) -> float:
    """Of the time of a step, over all ranks."""
    length = max(slot.end for rank in slots for slot in rank)
    busy = sum(slot.end - slot.start for rank in slots for slot in rank)
    return 1.0 - busy / (length * len(slots))


def bubble_fraction(name: str, pp: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Idle share of a step with equal stages, in closed form.

    ``(p - 1) / (m + p - 1)`` for gpipe (arXiv:1811.06965) and 1f1b; interleaved, ``v m`` for ``m`` (arXiv:2104.04473,
    section 2.2); ``3 v m`` with a split backward pass (ZB1P, arXiv:2401.10241). Exact where rounds are of ``p``
    micro-batches (for zbv from ``2 p`` micro-batches on); elsewhere ``idle_share`` of the slots is.
    """
    _check(name, pp, micro_batches, stages_per_rank)
    passes = micro_batches * stages_per_rank * (3 if name in SPLIT else 1)
    return (pp - 1) / (passes + pp - 1)


def peak_live(name: str, pp: int, micro_batches: int, stages_per_rank: int = 1) -> list[int]:
    """Micro-batches whose activations a rank keeps at most, summed over its stages, for every pipeline rank.

    GPipe keeps all (arXiv:1811.06965), 1f1b ``min(m, p - i)``, interleaved what is under way when the first backward
    pass begins (arXiv:2104.04473, section 2.2). Where the backward pass is split, activations are kept until its second
    half (arXiv:2401.10241, table 1). Closed forms; ``most_live`` counts, and a test compares.
    """
    _check(name, pp, micro_batches, stages_per_rank)
    return [_live(name, pp, rank, micro_batches, stages_per_rank) for rank in range(pp)]


def micro_batches_in_flight(parallel: ParallelConfig, pp: int, rank: int, count: int) -> Fraction:
    """``peak_live`` of pipeline rank ``rank`` in units of all its stages; ``count`` run a step, also too few to run."""
    if pp == 1:
        return Fraction(1)
    stages = parallel.stages_per_rank
    return Fraction(_live(parallel.pipeline, pp, rank, count, stages), stages)


def _live(name: str, pp: int, rank: int, m: int, v: int) -> int:
    each = m // max(1, m // pp)
    if name == "gpipe":
        return m
    if name == "1f1b":
        return min(m, pp - rank)
    if name == "interleaved_1f1b":
        return min(m * v, (v - 1) * each + 2 * (pp - 1 - rank) + 1)
    if name == "zero_bubble":
        return min(m * v, (v - 1) * each + pp)
    return min(2 * pp, m + 1 + rank)


def most_live(order: Sequence[Pass]) -> int:
    """Micro-batches whose activations are kept at most by a rank that makes these passes, over all its stages."""
    last: Kind = "W" if any(step.kind == "W" for step in order) else "B"
    live = most = 0
    for step in order:
        live += (step.kind == "F") - (step.kind == last)
        most = max(most, live)
    return most


def _check(name: str, pp: int, micro_batches: int, stages_per_rank: int) -> None:
    if name not in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"):
        raise ValueError(f"schedule {name!r} is none of gpipe, 1f1b, interleaved_1f1b, zero_bubble, zbv")
    if pp < 1 or micro_batches < 1 or stages_per_rank < 1:
        raise ValueError(
            f"pp={pp}, micro_batches={micro_batches} and stages_per_rank={stages_per_rank} must be 1 or more"
        )
    wanted = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(name, stages_per_rank)
    if stages_per_rank != wanted:
        raise ValueError(f"stages_per_rank={stages_per_rank} must be {wanted} with {name}")
    if name != "gpipe" and micro_batches < pp:
        raise ValueError(
            f"micro_batches={micro_batches} are fewer than pp={pp}; {name} needs one per rank, gpipe does not"
        )
    rounds = max(1, micro_batches // pp)
    if name in ("interleaved_1f1b", "zero_bubble") and micro_batches % rounds:
        more = micro_batches + rounds - micro_batches % rounds
        raise ValueError(f"micro_batches={micro_batches} do not make {rounds} equal rounds of {name}; {more} do")


def _needed(step: Pass, last: int) -> Pass | None:
    """The pass that must have ended before ``step`` can start; its own rank's earlier ones are in order anyway."""
    kind, stage, micro_batch = step
    if kind == "F":
        return Pass("F", stage - 1, micro_batch) if stage else None
    if kind == "B":
        return Pass("B", stage + 1, micro_batch) if stage < last else Pass("F", stage, micro_batch)
    return Pass("B", stage, micro_batch)


def _gpipe(rank: int, micro_batches: int) -> list[Pass]:
    return [Pass(kind, rank, index) for kind in ("F", "B") for index in range(micro_batches)]


def _one_forward_one_backward(rank: int, pp: int, micro_batches: int) -> list[Pass]:
    first = min(micro_batches, pp - rank)
    order = [Pass("F", rank, index) for index in range(first)]
    for index in range(micro_batches):
        order.append(Pass("B", rank, index))
        if first + index < micro_batches:
            order.append(Pass("F", rank, first + index))
    return order


def _interleaved(rank: int, pp: int, micro_batches: int, stages: int, split: bool) -> list[Pass]:
    """Rounds of ``each`` micro-batches through one stage after the other. W follows B ``rank`` passes later."""
    each, total = micro_batches // max(1, micro_batches // pp), micro_batches * stages

    def nth(kind: Kind, number: int) -> Pass:
        local = number // each % stages
        local = local if kind == "F" else stages - 1 - local
        return Pass(kind, local * pp + rank, number // (each * stages) * each + number % each)

    first = min(total, (stages - 1) * each + (1 if split else 2) * (pp - 1 - rank))
    order = [nth("F", number) for number in range(first)]
    for number in range(total):
        if first + number < total:
            order.append(nth("F", first + number))
        order.append(nth("B", number))
        if split and number >= rank:
            order.append(Pass("W", *nth("B", number - rank)[1:]))
    if split:
        order += [Pass("W", *nth("B", number)[1:]) for number in range(max(0, total - rank), total)]
    return order


def _zbv(rank: int, pp: int, micro_batches: int) -> list[Pass]:
    """Down the ranks and up again. Made for at least ``2 p - 1`` micro-batches; what is not there is left out."""
    most, down, up = max(2 * pp - 1, micro_batches), rank, 2 * pp - 1 - rank
    order: list[Pass] = []
    made: Counter[tuple[Kind, int]] = Counter()

    def add(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            order.append(Pass(kind, stage, made[kind, stage]))
            made[kind, stage] += 1

    for _ in range(2 * (pp - rank) - 1):
        add(down, "F")
    for _ in range(rank):
        add(up, "F")
        add(down, "F")
    for _ in range(pp - rank):
        add(up, "F", "B", "W")
    while made["F", up] < most:
        if made["F", down] < most:
            add(down, "F")
        add(down, "B", "W")
        add(up, "F", "B", "W")
    for _ in range(rank):
        add(down, "B")
        add(up, "B")
    for _ in range(pp - rank):
        add(down, "B", "W")
    for stage in (up, down):
        while made["W", stage] < made["B", stage]:
            add(stage, "W")
    return [step for step in order if step.micro_batch < micro_batches]
