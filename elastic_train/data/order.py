"""The order of the samples as arithmetic: a pure function of (number of samples, seed, epoch, index).

An epoch is the composition of two permutations. The outer one shuffles chunks of ``CHUNK`` consecutive samples; the
inner one shuffles inside windows of ``WINDOW`` neighbouring positions of that sequence. So any stretch of a window
reads whole chunks from few places, and a batch still mixes samples of many chunks. A window is worked out as a whole
when the first of its samples is asked for, and nothing else: 10^9 samples cost what 10 do.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Indices = np.ndarray[Any, np.dtype[np.uint64]]

CHUNK = 16
"""Consecutive samples that stay together on the outer level."""
WINDOW = 4096
"""Positions that are shuffled among each other on the inner level (256 chunks)."""
ROUNDS = 8


class Permutation:
    """A keyed permutation of ``range(size)``: a Feistel network with cycle walking.

    The network works on pairs (left, right) with left < a, right < b, where a * b is the smallest near-square product
    of at least ``size``, so few values have to be walked. Source: Black and Rogaway, "Ciphers with arbitrary finite
    domains" (CT-RSA 2002), method 3, with additions modulo a and b for the rounds.
    """

    __slots__ = ("_a", "_b", "_keys", "_size")

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        a = math.isqrt(max(size - 1, 0)) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-size // a))
        self._keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest(), ">u8").astype("u8")

    def images(self, indices: Indices) -> Indices:
        """The image of each of ``indices`` [n], all below ``size``."""
        return self._walked(indices, self._forth)

    def inverse(self, images: Indices) -> Indices:
        """The index that each of ``images`` [n] is the image of."""
        return self._walked(images, self._back)

    def _walked(self, values: Indices, network: Callable[[Indices], Indices]) -> Indices:
        """``network(values)``; what lies outside goes on along its cycle until it comes back in."""
        values = network(values)
        while len(outside := np.flatnonzero(values >= self._size)):
            values[outside] = network(values[outside])
        return values

    def _forth(self, values: Indices) -> Indices:
        right, left = np.divmod(values, self._a)
        for first, second in self._keys.reshape(-1, 2):
            left = _added(left, _mix(first, right) % self._a, self._a)
            right = _added(right, _mix(second, left) % self._b, self._b)
        return right * self._a + left

    def _back(self, values: Indices) -> Indices:
        right, left = np.divmod(values, self._a)
        for first, second in self._keys.reshape(-1, 2)[::-1]:
            right = _taken(right, _mix(second, left) % self._b, self._b)
            left = _taken(left, _mix(first, right) % self._a, self._a)
        return right * self._a + left


def _added(values: Indices, more: Indices, modulus: np.uint64) -> Indices:
    """The sum of two below ``modulus``, modulo that: the lesser one, for unsigned numbers turn around below 0."""
    total = values + more
    least: Indices = np.minimum(total, total - modulus)
    return least


def _taken(values: Indices, less: Indices, modulus: np.uint64) -> Indices:
    """As ``_added``, for the difference."""
    rest = values - less
    least: Indices = np.minimum(rest, rest + modulus)
    return least


def _mix(key: np.uint64, values: Indices) -> Indices:
    """64 well-mixed bits of each (the finalizer of splitmix64)."""
    x = values + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder:
    """Which sample comes at which place of training, for all epochs."""

    def __init__(self, num_samples: int, seed: int | str) -> None:
        """``num_samples`` samples per epoch (at least 1); any two seeds are different orders."""
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        self.num_samples = num_samples
        self.seed = seed
        self._chunks = -(-num_samples // CHUNK)
        self._lacking = self._chunks * CHUNK - num_samples  # samples that the last chunk is short of
        self._outer = lru_cache(maxsize=4)(self._make_outer)
        self._window = lru_cache(maxsize=8)(self._make_window)

    def sample_id(self, n: int) -> int:
        """The sample at global index ``n`` >= 0, which runs on over epochs (epoch ``n // num_samples``)."""
        epoch, index = divmod(n, self.num_samples)
        window, place = divmod(index, WINDOW)
        return self._window(epoch, window).item(place)

    def _make_window(self, epoch: int, window: int) -> Indices:
        """The samples of a window, in order."""
        first = window * WINDOW
        places = np.arange(min(WINDOW, self.num_samples - first), dtype=np.uint64)
        inner = Permutation(len(places), f"elastic_train order 1 window {self.seed} {epoch} {window}")
        return self._chunked(epoch, first + places)[inner.images(places)]

    def _chunked(self, epoch: int, positions: Indices) -> Indices:
        """The outer level: the samples at neighbouring positions of the shuffled sequence of chunks."""
        permutation, short_end = self._outer(epoch)
        shifted = positions + (positions >= short_end) * np.uint64(self._lacking)  # as if no chunk were short
        slots, places = np.divmod(shifted, CHUNK)
        chunks = permutation.images(np.arange(slots[0], slots[-1] + 1, dtype=np.uint64))
        samples: Indices = chunks[slots - slots[0]] * np.uint64(CHUNK) + places
        return samples

    def _make_outer(self, epoch: int) -> tuple[Permutation, int]:
        """The permutation of the chunks, and the position behind the short one, which shifts all that follow it."""
        permutation = Permutation(self._chunks, f"elastic_train order 1 chunks {self.seed} {epoch}")
        slot = permutation.inverse(np.array([self._chunks - 1], np.uint64)).item()
        return permutation, (slot + 1) * CHUNK - self._lacking
