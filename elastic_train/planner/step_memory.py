"""What a pipeline rank holds at the moments of a step in which it can hold most; see ``planner.memory``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.model_state import division, model_state, numbers_of
from elastic_train.planner.parameters import StageParameters, Unit
from elastic_train.planner.pass_memory import PassMemory
from elastic_train.planner.schedule import micro_batches_in_flight

AT_LOSS = "at the loss"
AT_HEAD = "in the backward pass of the head"
AT_BLOCK = "in the backward pass of a block"
AT_REDUCTION = "at the reduction of a block's gradients"
AT_END = "at the end of the backward pass"
AT_UPDATE = "in the update"
AT_PUBLICATION = "when updated weights are gathered"


class Terms(dict[str, int]):
    """Term -> bytes; one that is not there is 0. (As a Counter, in a fraction of the time: searches make very many.)"""

    __slots__ = ()

    def __missing__(self, term: str) -> int:
        return 0

    def copy(self) -> Terms:
        return Terms(self)

    def at_least(self, others: Mapping[str, int]) -> Terms:
        """Raise each term to that of ``others``, in place; returns itself."""
        for term, size in others.items():
            if size > self[term]:
                self[term] = size
        return self

    def total(self) -> int:
        return sum(self.values())


class StepMemory:
    """One pipeline rank, as the first rank of every other axis; all in bytes."""

    def __init__(self, job: Job, layout: Layout, number: int, stages: Sequence[StageParameters]) -> None:
        """``number``: of the pipeline rank, which holds ``stages``."""
        self._job, self._layout, self._stages = job, layout, stages
        self._compute, self._reduce = numbers_of(job).compute, numbers_of(job).gradient
        self._cut = division(job, layout)
        self._exact = job.training.determinism == "exact"
        self._count = micro_batches_per_rank(job, layout)
        self._flying = micro_batches_in_flight(job.parallel, layout.pp, number, self._count)
        # torch's pipelines let go of weights, and reduce, only after the last backward pass.
        self._keeps = not job.parallel.reshard_after_forward or layout.pp > 1
        # Such gradients of weights are collected, and reduced after the last backward pass.
        self._splits = layout.pp > 1 and job.parallel.splits_backward
        self._block, self._blocks = stages[0].block, sum(stage.blocks for stage in stages)
        self._outer = max((stage.outer for stage in stages), key=lambda unit: unit.padded)
        self._trained = [stage.trained for stage in stages]
        self._passes = PassMemory(job, layout, stages)
        self.state = model_state(job, layout, stages)

    def moments(self) -> Iterator[tuple[str, Terms]]:
        """(moment, term -> bytes). Moments come twice where later micro-batches find gradients of earlier ones."""
        yield from self._backward(self._flying, later=False)
        if self._count > 1 and (self._cut in ("gradients", "all") or self._splits):
            yield from self._backward(min(self._flying, Fraction(self._count - 1)), later=True)
        yield AT_END, self._end()
        yield AT_UPDATE, self._update()
        if self._cut in ("optimizer", "gradients"):
            yield AT_PUBLICATION, self._publication()

    def _backward(self, flying: Fraction, *, later: bool) -> Iterator[tuple[str, Terms]]:
        """A backward pass that begins with activations of ``flying`` micro-batches."""
        passes = self._passes
        held = self._resident(later)
        held["activations of blocks"] = int(flying * passes.blocks)
        held["other activations"] = int(flying * passes.outside)
        waiting = int((flying - 1) * passes.loss.kept)
        if passes.loss.most:
            held["logits and loss"] = waiting + passes.loss.most
            yield AT_LOSS, held
            held = held.copy()
            held["logits and loss"] = waiting + passes.loss.logits
            held["whole gradients"] += self._head_gradient()
            yield AT_HEAD, held
            held = held.copy()
            held["whole gradients"] -= self._head_gradient()
        held["logits and loss"] = waiting
        for number in (1, 2)[: self._blocks]:
            yield AT_BLOCK, self._block_pass(held, number, later)
            if self._reduces_in_passes:
                yield AT_REDUCTION, self._reduction(held, number, later)

    @property
    def _reduces_in_passes(self) -> bool:
        """Whether a bucket of whole gradients is scattered, and let go, as soon as it is complete."""
        return not self._exact and (self._cut == "gradients" or (self._cut == "all" and self._layout.pp == 1))

    def _resident(self, later: bool) -> Terms:
        """State and weights during the passes. ``later``: a backward pass of the step has been."""
        held = Terms(self.state | self._passes.standing)
        if self._cut != "all":
            held["whole gradients"] = self._compute * self._gradients if later and self._splits else 0
            if later and self._reduces_in_passes:
                # Those of the micro-batch before that were scattered last are waited for when others are.
                held.at_least(self._scattered(self._last, self._block))
            return held
        kept = self._padded if self._keeps else sum(stage.outer.padded for stage in self._stages)
        held["gathered weights"] = self._compute * kept
        if not self._exact and (self._keeps or not later):
            held["gradients"] = 0
        if later and self._keeps and not self._exact:
            held["whole gradients"] = self._reduce * self._gradients
        elif later and not self._exact:
            held["communication buffers"] = self._reduce * self._last.trained.padded  # FSDP2 keeps the last one
        return held

    def _block_pass(self, held: Terms, number: int, later: bool) -> Terms:
        """In the backward pass of the ``number``-th block, when gradients of activations are most.

        Of the block's gradients only that of its last projection is there.
        """
        held, block = self._without_blocks(held, number - 1, later), self._block
        work = {
            "gradients of activations": self._passes.backward,
            "whole gradients": self._compute * block.trained.largest,
        }
        held["whole gradients"] += self._waiting_head()
        if self._cut == "all" and not self._keeps:
            unit, ahead = self._compute * block.padded, self._job.parallel.prefetch
            held["gathered weights"] += (1 + ahead) * unit
            if not ahead and sum(work.values()) < unit:
                work = {"gathered weights": unit}  # of a buffer that is copied out before the pass begins
        for term, size in work.items():
            held[term] += size
        return held

    def _without_blocks(self, held: Terms, number: int, later: bool) -> Terms:
        """The backward pass is through with ``number`` blocks; the reduction of the last one is under way."""
        held, block = held.copy(), self._block
        held["activations of blocks"] -= number * self._passes.block
        if number == 0 or not self._reduces_in_passes:
            return held
        if self._cut == "gradients":
            return held.at_least(self._scattered(*[block] * number))
        # What comes out becomes the gradient, or is added to it.
        fresh = 1 if held["gradients"] else number
        held["communication buffers"] = self._reduce * block.trained.padded + FLOAT32 * fresh * block.trained.part
        if self._keeps:
            held["gathered weights"] -= number * self._compute * block.padded
            held["whole gradients"] -= number * self._reduce * block.trained.whole if later else 0
        return held

    def _reduction(self, held: Terms, number: int, later: bool) -> Terms:
        """The ``number``-th block's gradients are whole, and in the buffer from which they are scattered."""
        held, block = self._without_blocks(held, number, later), self._block
        if later and self._keeps and self._cut == "all":
            # Added to those of earlier micro-batches, tensor by tensor.
            held["whole gradients"] += self._reduce * block.trained.whole
            held["whole gradients"] += self._waiting_head() if self._compute != self._reduce else 0
        else:
            held["whole gradients"] += self._compute * block.trained.whole + self._waiting_head()
        if self._cut == "all":
            held.at_least(self._scattered(block))
            held["gathered weights"] += 0 if self._keeps else self._compute * self._job.parallel.prefetch * block.padded
        return held

    def _end(self) -> Terms:
        """What is outside the blocks is reduced, as the last unit; with ``zero3`` and a pipeline all units are."""
        held, outer, block = Terms(self.state | self._passes.standing), self._outer, self._block
        if self._cut in ("none", "optimizer") or self._exact:
            held["whole gradients"] = self._compute * max(outer.trained.largest, block.trained.largest)
        elif self._cut == "gradients":
            held["whole gradients"] = self._compute * outer.trained.whole
            held.at_least(self._scattered(self._last, block))
        elif self._layout.pp > 1:
            held["gathered weights"] = self._compute * self._padded
            held["whole gradients"] = self._reduce * self._gradients
            held.at_least(self._scattered(max(outer, block, key=lambda unit: unit.padded)))
            held["gradients"] = 0
        else:
            added_up = self._count > 1 and self._keeps
            held["whole gradients"] = (self._reduce if added_up else self._compute) * outer.trained.whole
            held.at_least(self._scattered(outer))
        return held

    def _update(self) -> Terms:
        held, outer, block = Terms(self.state | self._passes.standing), self._outer.trained, self._block.trained
        shards = 1 if self._cut == "none" else self._layout.shards
        # Clipping makes a float32 copy of a block's gradients, or of a matrix' outside the blocks; a cast is another.
        copies = 2 if self._reduce != FLOAT32 and self._cut != "all" else 1
        held["gradients in float32"] = copies * FLOAT32 * -(-max(block.whole, outer.largest) // shards)
        if self._exact:
            held["gradients in float32"] = FLOAT32 * sum(
                stage.whole if self._cut == "none" else stage.part for stage in self._trained
            )
        return held

    def _publication(self) -> Terms:
        """Weights are gathered with ``zero1`` and ``zero2``, two buckets at a time."""
        held = Terms(self.state | self._passes.standing)
        first, other = self._block.trained, self._outer.trained
        second = max(first, other, key=lambda unit: unit.padded)
        held["communication buffers"] = self._compute * sum(unit.padded + unit.part for unit in (first, second))
        return held

    def _scattered(self, *units: Unit) -> Terms:
        """Buffers of reduce-scatters under way. Gloo keeps a copy of what goes in; FSDP2's output becomes gradients."""
        padded = self._reduce * sum(unit.trained.padded for unit in units)
        out = 0 if self._cut == "all" else self._reduce * sum(unit.trained.part for unit in units)
        copies = padded if self._job.hosts.device == "cpu" else 0
        return Terms({"communication buffers": padded + out, "copies by gloo": copies})

    def _waiting_head(self) -> int:
        """The head's gradient where it waits for that of the embedding: ``zero2`` and ``zero3`` reduce them at once."""
        return self._head_gradient() if self._cut in ("gradients", "all") and not self._exact else 0

    def _head_gradient(self) -> int:
        return self._compute * max(stage.outer.largest if stage.last else 0 for stage in self._trained)

    @property
    def _last(self) -> Unit:
        """The tensors whose gradients are reduced last: those outside the blocks, unless they are frozen."""
        return self._outer if self._outer.trained.whole else self._block

    @property
    def _gradients(self) -> int:
        """Elements of all whole gradients."""
        return sum(stage.whole for stage in self._trained)

    @property
    def _padded(self) -> int:
        """Elements of all weights, gathered."""
        return sum(stage.padded for stage in self._stages)
