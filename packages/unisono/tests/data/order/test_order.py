"""The order of rows: a permutation per epoch, the same however positions are cut, at a cost that no size changes."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order.order import Order, Shuffle
from unisono.data.order.plan import StreamPlan
from unisono.runtime.errors import ConfigError, DataError

sizes = st.integers(1, 5000)
keys = st.integers(0, 2**63 - 1)
seeds = st.integers(0, 2**31 - 1)
EDGES = sorted({2**power + d for power in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16) for d in (-1, 0, 1)} - {0})


def _chi_square(counts: Counter[object], cells: int) -> float:
    expected = counts.total() / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in counts) + expected * (cells - len(counts))


# the permutation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", EDGES)
def test_shuffle_is_a_permutation_around_powers_of_two_and_four(size: int) -> None:
    for key in range(3):
        rows = Shuffle(size, key)(np.arange(size))
        assert rows.dtype == np.int64
        assert np.array_equal(np.sort(rows), np.arange(size))


@settings(max_examples=50, deadline=None)
@given(size=sizes, key=keys, data=st.data())
def test_an_element_does_not_depend_on_the_others_asked_for(size: int, key: int, data: st.DataObject) -> None:
    some = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    assert np.array_equal(Shuffle(size, key)(some), Shuffle(size, key)(np.arange(size))[some])


def test_all_permutations_of_three_are_about_equally_frequent() -> None:
    seen = Counter(tuple(Shuffle(3, key)(np.arange(3)).tolist()) for key in range(6000))
    assert set(seen) == set(itertools.permutations(range(3)))
    assert _chi_square(seen, 6) < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("place", [0, 3, 6])
def test_every_row_comes_about_equally_often_at_every_place(place: int) -> None:
    seen: Counter[object] = Counter(int(Shuffle(7, key)(np.array([place]))[0]) for key in range(5000))
    assert _chi_square(seen, 7) < 22.5  # 6 degrees of freedom, p = 0.001


def test_neighbours_do_not_stay_neighbours() -> None:
    """A permutation that keeps long runs would be one, and would not shuffle."""
    rows = Shuffle(4000, 5)(np.arange(4000))
    assert np.mean(np.abs(np.diff(rows)) == 1) < 0.005  # 2/4000 by chance
    assert abs(np.corrcoef(np.arange(4000), rows)[0, 1]) < 0.06  # four standard deviations


def test_the_order_is_pinned() -> None:
    """A change of these numbers would change every run that was ever interrupted."""
    assert Order(10, 0)(np.arange(12)).tolist() == [7, 8, 6, 4, 1, 5, 2, 0, 9, 3, 4, 6]


# positions to rows ------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(size=st.integers(10, 300), seed=seeds, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_order_is_the_same_for_any_way_of_cutting_positions(size: int, seed: int, cuts: list[int]) -> None:
    order, positions = Order(size, seed), np.arange(400)
    pieces = np.split(positions, sorted(cuts))
    assert np.array_equal(np.concatenate([order(piece) for piece in pieces]), order(positions))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_order_is_the_same_on_any_world_size(world_size: int) -> None:
    order, share = Order(31, 7), 12 // world_size
    ranks = [[order(np.arange(12) + 12 * step)[share * r :][:share] for r in range(world_size)] for step in range(9)]
    alone = order(np.arange(9 * 12))
    assert np.array_equal(np.concatenate([rows for step in ranks for rows in step]), alone)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 400), seed=seeds, epoch=st.integers(0, 50))
def test_each_epoch_has_every_row_exactly_once(size: int, seed: int, epoch: int) -> None:
    rows = Order(size, seed)(epoch * size + np.arange(size))
    assert np.array_equal(np.sort(rows), np.arange(size))


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    order = Order(100, 0)
    assert len({tuple(order(np.arange(100) + 100 * epoch).tolist()) for epoch in range(20)}) == 20
    assert len({tuple(Order(100, seed)(np.arange(100)).tolist()) for seed in range(20)}) == 20


def test_far_seeks_into_huge_sources_cost_no_time_and_no_memory() -> None:
    order = Order(10**12, 0)
    tracemalloc.start()
    began = perf_counter()
    rows = order(10**15 + np.arange(64))
    seconds, (_, peak) = perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(rows.tolist())) == 64
    assert 0 <= rows.min() < rows.max() < 10**12
    assert seconds < 1.0
    assert peak < 1_000_000


def test_unshuffled_order_is_the_rows_own() -> None:
    assert Order(4, 9, shuffle=False)(np.arange(10)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_the_epoch_of_a_position_is_how_often_the_source_was_passed() -> None:
    order = Order(10, 0)
    assert order.epochs(np.array([0, 9, 10, 25])).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("size", [0, -1])
def test_a_source_without_rows_is_refused(size: int) -> None:
    with pytest.raises(DataError, match="no rows"):
        Order(size, 0)


# steps to positions -----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(size=st.integers(2, 200), batch=st.integers(1, 64), epochs=st.floats(0.5, 4.0), seed=seeds)
def test_batches_are_the_order_cut_without_gaps_and_only_the_last_one_is_short(
    size: int, batch: int, epochs: float, seed: int
) -> None:
    order = Order(size, seed)
    plan = StreamPlan.create(order, batch, None, epochs)
    batches = [plan.batch(step) for step in range(plan.steps)]
    assert np.array_equal(np.concatenate(batches), order(np.arange(round(epochs * size))))
    assert [plan.rows(step) for step in range(plan.steps)] == list(map(len, batches))
    assert [len(rows) for rows in batches[:-1]] == [batch] * (plan.steps - 1)
    assert 1 <= len(batches[-1]) <= batch


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 200), batch=st.integers(1, 64), steps=st.integers(1, 20))
def test_a_run_counted_in_steps_has_only_full_batches(size: int, batch: int, steps: int) -> None:
    plan = StreamPlan.create(Order(size, 0), batch, steps, None)
    assert plan.steps == steps
    assert [len(plan.batch(step)) for step in range(steps)] == [batch] * steps


def test_an_epoch_of_less_than_one_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs=0\.01 of 10 rows is less than one row"):
        StreamPlan.create(Order(10, 0), 4, None, 0.01)
