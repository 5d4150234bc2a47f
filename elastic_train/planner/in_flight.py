"""How many micro-batches' activations a pipeline rank keeps at once."""

from __future__ import annotations

from fractions import Fraction

from elastic_train.config.parallel import ParallelConfig


def micro_batches_in_flight(parallel: ParallelConfig, pp: int, rank: int, count: int) -> Fraction:
    """Most micro-batches alive on pipeline rank ``rank``, in units of all stages of that rank; ``count`` run a step.

    GPipe keeps all (arXiv:1811.06965); 1F1B ``min(m, p - i)``, interleaved ``(vp + p - 1 - 2i) / v``
    (arXiv:2104.04473, section 2.2); the zero-bubble schedules keep ``p``, until weights have got their gradients
    (arXiv:2401.10241, table 1). The table of docs/parallelism.md, which orders of torch, played through, agree with.
    """
    if pp == 1:
        return Fraction(1)
    if parallel.pipeline == "gpipe":
        return Fraction(count)
    if parallel.pipeline == "1f1b":
        return Fraction(min(count, pp - rank))
    if parallel.pipeline == "interleaved_1f1b":
        each = parallel.stages_per_rank
        return min(Fraction(count), Fraction(each * pp + pp - 1 - 2 * rank, each))
    return Fraction(min(count, pp))
