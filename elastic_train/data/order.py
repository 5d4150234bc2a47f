"""The order of the samples as arithmetic: a pure function of (number of samples, seed, epoch, index).

An epoch is the composition of two permutations. The outer one shuffles chunks of ``CHUNK`` consecutive samples; the
inner one shuffles inside windows of ``WINDOW`` neighbouring positions of that sequence. So any stretch of a window
reads whole chunks from few places, and a batch still mixes samples of many chunks. Nothing is stored: 10^9
samples cost what 10 do.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

CHUNK = 16
"""Consecutive samples that stay together on the outer level."""
WINDOW = 4096
"""Positions that are shuffled among each other on the inner level (256 chunks)."""
ROUNDS = 8
MASK = 2**64 - 1


class Permutation:
    """A keyed permutation of ``range(size)``: a Feistel network with cycle walking.

    The network works on pairs (left, right) with left < a, right < b, where a * b is the smallest near-square product
    of at least ``size``, so few values have to be walked. Source: Black and Rogaway, "Ciphers with arbitrary finite
    domains" (CT-RSA 2002), method 3, with additions modulo a and b for the rounds.
    """

    __slots__ = ("_a", "_b", "_keys", "_size")

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._a = math.isqrt(max(size - 1, 0)) + 1
        self._b = -(-size // self._a)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "big") for r in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        """The image of ``index`` (0 <= index < size)."""
        while True:
            right, left = divmod(index, self._a)
            for r in range(0, ROUNDS, 2):
                left = (left + _mix(self._keys[r], right)) % self._a
                right = (right + _mix(self._keys[r + 1], left)) % self._b
            index = right * self._a + left
            if index < self._size:  # else: walk along the cycle until it comes back in
                return index

    def inverse(self, image: int) -> int:
        """The index whose image this is."""
        while True:
            right, left = divmod(image, self._a)
            for r in range(ROUNDS - 2, -1, -2):
                right = (right - _mix(self._keys[r + 1], left)) % self._b
                left = (left - _mix(self._keys[r], right)) % self._a
            image = right * self._a + left
            if image < self._size:
                return image


def _mix(key: int, value: int) -> int:
    """64 well-mixed bits (the finalizer of splitmix64)."""
    x = (value + key) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class SampleOrder:
    """Which sample comes at which place of training, for all epochs."""

    def __init__(self, num_samples: int, seed: int | str) -> None:
        """``num_samples`` samples per epoch (at least 1); any two seeds are different orders."""
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        self.num_samples = num_samples
        self.seed = seed
        self._chunks = -(-num_samples // CHUNK)
        self._last = num_samples - (self._chunks - 1) * CHUNK  # samples of the last chunk, which may be short
        self._outer = lru_cache(maxsize=4)(self._make_outer)
        self._inner = lru_cache(maxsize=8)(self._make_inner)
        self._chunk = lru_cache(maxsize=2 * WINDOW // CHUNK)(
            self._chunk_at
        )  # each chunk of a window is asked for often

    def sample_id(self, n: int) -> int:
        """The sample at global index ``n`` >= 0, which runs on over epochs (epoch ``n // num_samples``)."""
        epoch, index = divmod(n, self.num_samples)
        window, place = divmod(index, WINDOW)
        return self._chunked(epoch, window * WINDOW + self._inner(epoch, window)(place))

    def _chunked(self, epoch: int, position: int) -> int:
        """The outer level: the chunk at this position of the shuffled sequence of chunks, and the place in it."""
        _, short = self._outer(epoch)
        after = position - short * CHUNK - self._last
        if after >= 0:  # behind the short chunk, which shifts all that follow it
            slot, place = divmod(after, CHUNK)
            slot += short + 1
        else:
            slot, place = divmod(position, CHUNK)
        return self._chunk(epoch, slot) * CHUNK + place

    def _chunk_at(self, epoch: int, slot: int) -> int:
        return self._outer(epoch)[0](slot)

    def _make_outer(self, epoch: int) -> tuple[Permutation, int]:
        permutation = Permutation(self._chunks, f"elastic_train order 1 chunks {self.seed} {epoch}")
        return permutation, permutation.inverse(self._chunks - 1)

    def _make_inner(self, epoch: int, window: int) -> Permutation:
        size = min(WINDOW, self.num_samples - window * WINDOW)
        return Permutation(size, f"elastic_train order 1 window {self.seed} {epoch} {window}")
