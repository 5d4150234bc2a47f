from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from collections import Counter
from random import Random
from statistics import NormalDist

import numpy as np
import pytest

from elastic_train.data import order as order_module
from elastic_train.data.order import CHUNK, ROUNDS, WINDOW, Indices, Permutation, SampleOrder


def epoch(num_samples: int, seed: int, number: int) -> list[int]:
    order = SampleOrder(num_samples, seed)
    return [order.sample_id(number * num_samples + index) for index in range(num_samples)]


def chi_square_limit(degrees: int, p: float = 1e-4) -> float:
    """Value that chi-square exceeds with probability ``p`` (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + NormalDist().inv_cdf(1 - p) * part**0.5) ** 3)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 97, 1000, 4099])
def test_a_permutation_is_a_bijection_with_an_inverse(size: int) -> None:
    permutation, indices = Permutation(size, "key"), np.arange(size, dtype=np.uint64)
    images = permutation.images(indices)
    assert sorted(images.tolist()) == list(range(size))
    assert permutation.inverse(images).tolist() == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 97, WINDOW, WINDOW + 1, 3 * WINDOW + 7, 9973])
def test_every_sample_comes_once_per_epoch(size: int) -> None:
    for number in range(3):
        assert sorted(epoch(size, 1, number)) == list(range(size))


@pytest.mark.slow
def test_every_sample_comes_once_in_a_large_epoch() -> None:
    size = 10**6 + 3
    seen = bytearray(size)
    order = SampleOrder(size, 7)
    for index in range(size):
        seen[order.sample_id(size + index)] += 1
    assert seen == b"\x01" * size


def test_orders_differ_between_epochs_and_seeds_and_are_reproducible() -> None:  # DA-09
    first, second, other = epoch(1000, 1, 0), epoch(1000, 1, 1), epoch(1000, 2, 0)
    assert first != second and first != other and second != other
    assert set(first) == set(second) == set(other)
    assert (first, second, other) == (epoch(1000, 1, 0), epoch(1000, 1, 1), epoch(1000, 2, 0))
    for one, two in ((first, second), (first, other)):  # independent permutations agree in about one place
        assert sum(a == b for a, b in zip(one, two, strict=True)) < 10


def test_the_order_is_the_same_in_every_process_and_version() -> None:
    here = [SampleOrder(100_003, 5).sample_id(n) for n in (0, 1, 2, 5000, 100_002, 100_003, 10**12)]
    code = (
        "from elastic_train.data.order import SampleOrder\n"
        "print([SampleOrder(100_003, 5).sample_id(n) for n in (0, 1, 2, 5000, 100_002, 100_003, 10**12)])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)
    assert here == FROZEN  # checkpoints resume with this order: it must never change


FROZEN = [97801, 5546, 19886, 69725, 8855, 98850, 33241]


@pytest.mark.parametrize("size", [2, 3, 7, 16, 24])
def test_every_place_is_equally_likely(size: int) -> None:
    """Chi-square over seeds: sample 0 and the last sample land at every place equally often (p > 1e-4)."""
    seeds = 3000
    epochs = [epoch(size, seed, 0) for seed in range(seeds)]
    for sample in (0, size - 1):
        places = Counter(ids.index(sample) for ids in epochs)
        expected = seeds / size
        statistic = sum((places[place] - expected) ** 2 / expected for place in range(size))
        assert statistic < chi_square_limit(size - 1)


def test_all_orders_of_four_are_equally_likely() -> None:
    """Chi-square over the 24 orders of 4 samples (p > 1e-4)."""
    counts = Counter(tuple(epoch(4, seed, 0)) for seed in range(4800))
    assert sum((counts[order] - 200) ** 2 / 200 for order in counts) + 200 * (24 - len(counts)) < chi_square_limit(23)


@pytest.mark.parametrize("size", [10**6 + 3, 10**9])
def test_first_samples_of_epochs_are_uniform(size: int) -> None:
    """Chi-square over 64 parts of the data set of the first sample of 2,000 epochs, and of a stretch of one (p > 1e-4).

    A stretch of a window is of whole chunks, so its samples are not independent: one of each chunk is counted.
    """
    order = SampleOrder(size, 3)
    firsts = [order.sample_id(number * size) for number in range(2000)]
    stretch = {order.sample_id(index) // CHUNK * CHUNK for index in range(16 * WINDOW)}
    for ids in (firsts, stretch):
        parts = Counter(i * 64 // size for i in ids)
        expected = len(ids) / 64
        assert sum((parts[part] - expected) ** 2 / expected for part in range(64)) < chi_square_limit(63)


def test_any_place_of_any_epoch_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in hashes: of a billion samples, deep in training, one window is worked out, as of ten thousand."""
    hashes = 0

    def counted(key: np.uint64, values: Indices) -> Indices:
        nonlocal hashes
        hashes += len(values)
        return mix(key, values)

    mix = order_module._mix
    monkeypatch.setattr(order_module, "_mix", counted)
    random, places = Random(1), WINDOW + WINDOW // CHUNK + 2  # two levels, and the short chunk's place
    for size in (10**4, 10**6, 10**9):
        order, hashes = SampleOrder(size, 1), 0
        for _ in range(50):
            order.sample_id(random.randrange(10**6) * size + random.randrange(size))
        assert hashes < 50 * places * ROUNDS * 1.2  # few are walked on


def test_a_window_has_what_its_formula_says() -> None:
    """Chunk by chunk in whole numbers of any length, as the paper says: nothing turns around that should not."""
    random = Random(2)
    for size in (1, 2, CHUNK + 1, 97, WINDOW, 3 * WINDOW + 7, 10**6 + 3, 10**9, 2**40 + 1, 10**18 + 9):
        for seed in (1, "1 prose"):
            order = SampleOrder(size, seed)
            for n in [0, size - 1, size, *(random.randrange(10**6 * size) for _ in range(10))]:
                assert order.sample_id(n) == by_hand(size, seed, n), (size, seed, n)


def by_hand(size: int, seed: int | str, n: int) -> int:
    epoch, index = divmod(n, size)
    window, place = divmod(index, WINDOW)
    key = f"elastic_train order 1 window {seed} {epoch} {window}"
    position = window * WINDOW + image(min(WINDOW, size - window * WINDOW), key, place)
    chunks, key = -(-size // CHUNK), f"elastic_train order 1 chunks {seed} {epoch}"
    slot, place = divmod(position, CHUNK)
    lacking = chunks * CHUNK - size
    short = image(chunks, key, chunks - 1, back=True)
    if position >= (short + 1) * CHUNK - lacking:
        slot, place = divmod(position + lacking, CHUNK)
    return image(chunks, key, slot) * CHUNK + place


def image(size: int, key: str, index: int, back: bool = False) -> int:
    """Of a Feistel network over (left, right), left below a and right below b, walked until it is below ``size``."""
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    keys = [int.from_bytes(digest[at : at + 8], "big") for at in range(0, len(digest), 8)]
    while True:
        right, left = divmod(index, a)
        for number in reversed(range(ROUNDS)) if back else range(ROUNDS):
            sign = -1 if back else 1
            if number % 2:
                right = (right + sign * mixed(keys[number] + left)) % b
            else:
                left = (left + sign * mixed(keys[number] + right)) % a
        index = right * a + left
        if index < size:
            return index


def mixed(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x %= 2**64
        x = (x ^ (x >> shift)) * factor
    return x % 2**64


def test_a_window_of_a_billion_samples_has_each_of_its_own_once() -> None:
    order = SampleOrder(10**9, 1)
    start = 123_456 * 10**9 + 1000 * WINDOW
    ids = [order.sample_id(n) for n in range(start, start + WINDOW)]
    assert len(set(ids)) == WINDOW and min(ids) >= 0 and max(ids) < 10**9
    assert {Counter(i // CHUNK for i in ids)[chunk] for chunk in {i // CHUNK for i in ids}} == {CHUNK}


def test_a_window_reads_few_places_and_a_batch_many() -> None:
    ids = epoch(40 * WINDOW, 1, 0)
    window = ids[WINDOW : 2 * WINDOW]
    assert len({sample // CHUNK for sample in window}) <= WINDOW // CHUNK + 1
    assert len({sample // CHUNK for sample in window[:64]}) > 40


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="num_samples=0 must be at least 1"):
        SampleOrder(0, 1)
