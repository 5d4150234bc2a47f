"""The harness itself: a test suite that hangs or swallows a failure would prove nothing."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def sum_of_ranks(rank: int) -> float:
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {bad} is bad")
    dist.barrier()


def hang_on(rank: int, bad: int) -> None:
    if rank == bad:
        time.sleep(600)
    dist.barrier()


def die_on(rank: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(sum_of_ranks, 3) == [3.0, 3.0, 3.0]


def test_the_first_exception_is_reported() -> None:
    with pytest.raises(RankError, match="ValueError: rank 1 is bad"):
        run_ranks(fail_on, 3, 1)


def test_a_hang_fails() -> None:
    with pytest.raises(RankError, match="did not finish in time"):
        run_ranks(hang_on, 2, 0, timeout=3.0)


def test_a_death_fails() -> None:
    with pytest.raises(RankError):
        run_ranks(die_on, 2, 1)
    assert run_ranks(sum_of_ranks, 2) == [1.0, 1.0]
