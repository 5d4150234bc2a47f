from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.mixture import PERIOD, MixedOrder, Mixture, shares
from elastic_train.data.order import SampleOrder

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=5)


def sources(mixture: Mixture, places: range) -> list[int]:
    return [mixture.locate(n)[0] for n in places]


@given(WEIGHTS)
def test_shares_are_within_one_of_the_exact_ones(weights: list[float]) -> None:
    weights[0] += sum(weights) / 10
    small = [weight for weight in weights if weight * PERIOD < sum(weights)]
    if small:
        return
    counts = shares(weights)
    assert sum(counts) == PERIOD
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - weight * PERIOD / sum(weights)) < 1 + 1e-6


def test_the_largest_remainders_get_the_last_places() -> None:
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([0.55, 0.25, 0.2], 10) == [6, 2, 2]
    assert shares([2, 0, 1], 9) == [6, 0, 3]
    with pytest.raises(ValueError, match=r"weight 0\.0001 of 1\.0001 is less than one of 1024 places"):
        shares([1, 0.0001])


@settings(max_examples=20)
@given(WEIGHTS, st.integers(0, 2**32 - 1), st.integers(0, 10**9))
def test_every_table_is_exact_and_each_source_goes_on_in_its_own_order(
    weights: list[float], seed: int, table: int
) -> None:
    weights = [weight + max(weights) / 100 for weight in weights]
    mixture, counts = Mixture([(0, weights)], seed), shares(weights)
    start = table * PERIOD
    seen = [mixture.locate(n) for n in range(start, start + PERIOD)]
    for source, count in enumerate(counts):
        places = [place for found, place in seen if found == source]
        assert places == list(range(table * count, (table + 1) * count))
        assert mixture.used(source, start) == table * count


def test_tables_are_arranged_differently_and_the_same_for_a_seed() -> None:
    mixture = Mixture([(0, [3, 1])], 7)
    tables = [tuple(sources(mixture, range(k * PERIOD, (k + 1) * PERIOD))) for k in range(4)]
    assert len(set(tables)) == 4
    assert sources(Mixture([(0, [3, 1])], 7), range(PERIOD)) == list(tables[0])
    assert sources(Mixture([(0, [3, 1])], 8), range(PERIOD)) != list(tables[0])


def test_places_of_a_source_are_spread_evenly() -> None:
    """Chi-square of the places of one source over eighths of its table, in 200 tables (p > 1e-4: 29.88 at 7)."""
    mixture, counts = Mixture([(0, [1, 3])], 1), Counter[int]()
    for n in range(200 * PERIOD):
        if mixture.locate(n)[0] == 0:
            counts[n % PERIOD // (PERIOD // 8)] += 1
    expected = 200 * PERIOD / 4 / 8
    assert sum((counts[part] - expected) ** 2 / expected for part in range(8)) < 29.88


def test_what_a_place_is_never_changes() -> None:
    """Checkpoints resume with it."""
    mixture = Mixture([(0, [5, 2, 1]), (3000, [0, 1, 1])], 5)
    assert [mixture.locate(n) for n in (0, 1, 1023, 1024, 2999, 3000, 4711, 10**12)] == FROZEN


FROZEN = [(0, 0), (0, 1), (0, 639), (1, 256), (0, 1878), (2, 373), (1, 1594), (2, 499999998873)]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.randoms())
def test_a_phase_begins_a_new_table_and_no_source_skips_or_repeats(lengths: list[int], random: object) -> None:
    starts = [0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))]
    given_weights = [[1.0, 2.0, 3.0], [3.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 1.0, 5.0]][: len(starts)]
    mixture = Mixture(list(zip(starts, given_weights, strict=True)), 3)
    following = [0, 0, 0]
    end = starts[-1] + PERIOD
    for n in range(end):
        source, place = mixture.locate(n)
        assert place == following[source]
        following[source] += 1
        if n % 500 == 0:
            assert [mixture.used(index, n + 1) for index in range(3)] == following
    last = Counter(sources(mixture, range(starts[-1], end)))
    assert [last[index] for index in range(3)] == shares(given_weights[-1])


def test_one_source_is_itself() -> None:
    mixture = Mixture([(0, [0.3])], 1)
    assert [mixture.locate(n) for n in (0, 5, 10**12)] == [(0, 0), (0, 5), (0, 10**12)]
    assert mixture.used(0, 1500) == 1500
    order = MixedOrder(mixture, [SampleOrder(1000, 1)])
    alone = SampleOrder(1000, 1)
    assert [order.sample_id(n) for n in range(3000)] == [alone.sample_id(n) for n in range(3000)]


def test_ids_are_unique_over_sources_and_an_epoch_of_each_has_all_of_it() -> None:
    orders = [SampleOrder(size, f"1 {size}") for size in (100, 7, 50)]
    order = MixedOrder(Mixture([(0, [2, 1, 1])], 1), orders)
    assert order.num_samples == 157
    ids = [order.sample_id(n) for n in range(PERIOD)]
    by_source = {source: [i for i in ids if order.source_of(i)[0] == source] for source in range(3)}
    for source, (first, size) in enumerate([(0, 100), (100, 7), (107, 50)]):
        used = by_source[source]
        for start in range(0, len(used) - size, size):
            assert sorted(used[start : start + size]) == list(range(first, first + size))
    assert order.source_of(99) == (0, 99) and order.source_of(100) == (1, 0) and order.source_of(156) == (2, 49)


def test_a_far_place_costs_what_a_near_one_does() -> None:
    """Counted in tables that are built: one for any place, however many phases and places there are before it."""
    mixture = Mixture([(0, [1, 1]), (10**6, [1, 3]), (10**9, [3, 1])], 1)
    built = mixture._table.cache_info().misses
    for n in (0, 10**6 - 1, 10**9 - 1, 10**12):
        mixture.locate(n)
    assert mixture._table.cache_info().misses - built <= 4
    assert all(b > a for a, b in pairwise([mixture.used(0, 10**k) for k in range(3, 12)]))
