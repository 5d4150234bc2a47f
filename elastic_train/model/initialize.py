"""Initial weights that do not depend on the layout: every block of rows has its own random stream.

A tensor is cut into blocks of rows by its global shape alone. A rank generates the blocks that its shard touches and
keeps its part.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from elastic_train.model.lora import DOWN, UP

BLOCK_ELEMENTS = 32_768
"""Approximate size of a block: small enough that a shard wastes little, large enough to amortise the seeding."""


def fill_initial(
    shard: Tensor, name: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], seed: int, std: float
) -> None:
    """Write this shard's part of parameter ``name``: norm weights are 1, biases 0, matrices normal(0, ``std``).

    Of adapters A is uniform within 1 / sqrt(inputs), B is 0, as in PEFT (kaiming_uniform with a = sqrt(5)).
    ``shard``: the box at ``offsets`` of the global tensor; written in place, may be empty, any device.
    Random stream: numpy Philox keyed by BLAKE2b of (seed, name, block number); 32-bit numbers.
    """
    if len(global_shape) == 1:
        shard.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    module = name.split(".")[-2]
    if module == UP:
        shard.zero_()
        return
    if shard.numel() == 0:
        return
    rows_per_block = max(1, BLOCK_ELEMENTS // global_shape[1])
    first, last = offsets[0], offsets[0] + shard.shape[0]
    for block in range(first // rows_per_block, (last - 1) // rows_per_block + 1):
        start = block * rows_per_block
        rows = min(rows_per_block, global_shape[0] - start)
        generator, shape = _generator(name, seed, block), (rows, global_shape[1])
        values = _uniform(generator, shape) if module == DOWN else _normal(generator, shape, std)
        low, high = max(start, first), min(start + rows, last)
        columns = slice(offsets[1], offsets[1] + shard.shape[1])
        shard[low - first : high - first].copy_(torch.from_numpy(values[low - start : high - start, columns]))


def _generator(name: str, seed: int, block: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype="<u8")))


def _normal(generator: np.random.Generator, shape: tuple[int, int], std: float) -> np.ndarray:
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _uniform(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Within 1 / sqrt(columns) on both sides of 0."""
    return (generator.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)) / np.float32(shape[1] ** 0.5)
