"""Sizes that axes can have: what the job file gives, and how what is left can be divided."""

from __future__ import annotations

import math
from collections.abc import Iterator

from elastic_train.config.layout import AXES, Layout
from elastic_train.config.parallel import ParallelConfig


def smallest_layout(parallel: ParallelConfig) -> Layout:
    """The fixed axes, every ``auto`` axis at 1: the easiest to satisfy, as larger axes only add constraints."""
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    return Layout(**{axis: 1 if size == "auto" else size for axis, size in sizes.items()})


def layouts_of(parallel: ParallelConfig, world: int) -> Iterator[Layout]:
    """All layouts of exactly ``world`` ranks that keep the fixed axes, valid for a model or not."""
    fixed = smallest_layout(parallel)
    rest, remainder = divmod(world, fixed.world_size)
    if remainder:
        return
    free = [axis for axis in AXES if getattr(parallel, axis) == "auto"]
    for sizes in factorizations(rest, len(free)):
        yield Layout(**fixed.as_dict() | dict(zip(free, sizes, strict=True)))


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write ``number`` as a product of ``parts`` factors."""
    if parts == 0:
        if number == 1:
            yield ()
        return
    for factor in divisors(number) if parts > 1 else (number,):
        for others in factorizations(number // factor, parts - 1):
            yield (factor, *others)


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})
