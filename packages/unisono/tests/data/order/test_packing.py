"""Every unit lies in one bin, no bin holds too much, and the fast algorithms decide as the textbook's slow ones do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order.packing import Pieces, pack_concatenated, pack_offline, pack_online
from unisono.runtime.errors import DataError

Pack = Callable[[np.ndarray, int], Pieces]
WAYS: dict[str, Pack] = {
    "online": lambda lengths, capacity: pack_online(lengths, capacity, 3),
    "offline": pack_offline,
    "concatenate": pack_concatenated,
}
lengths_of_items = st.lists(st.integers(0, 70), max_size=80).map(lambda values: np.asarray(values, dtype=np.int64))
capacities = st.integers(1, 24)


def lognormal(number: int, seed: int = 0) -> np.ndarray:
    """Documents with a median of 403 and a mean of 738 tokens."""
    drawn = np.random.default_rng(seed).lognormal(np.log(403), np.sqrt(2 * np.log(738 / 403)), number)
    return np.maximum(1, np.round(drawn)).astype(np.int64)


def bound(lengths: np.ndarray, capacity: int) -> int:
    """Fewer bins than this cannot hold them."""
    return -(-int(lengths.sum()) // capacity)


# what any packing is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(lengths=lengths_of_items, capacity=capacities)
def test_every_unit_of_every_item_lies_in_one_bin(way: str, lengths: np.ndarray, capacity: int) -> None:
    pieces = WAYS[way](lengths, capacity)
    units = [
        (item, unit)
        for item, first, last in zip(pieces.item, pieces.first, pieces.last, strict=True)
        for unit in range(first, last)
    ]
    assert sorted(units) == [(item, unit) for item, length in enumerate(lengths) for unit in range(length)]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=150, deadline=None)
@given(lengths=lengths_of_items, capacity=capacities)
def test_bins_are_neither_empty_nor_too_full_and_are_numbered_by_their_first_item(
    way: str, lengths: np.ndarray, capacity: int
) -> None:
    pieces = WAYS[way](lengths, capacity)
    assert len(pieces.used) == pieces.bins
    assert ((pieces.used >= 1) & (pieces.used <= capacity)).all()
    assert (pieces.first < pieces.last).all()
    order = np.lexsort((pieces.first, pieces.item, pieces.bin))
    assert np.array_equal(order, np.arange(len(pieces)))  # sorted
    beginnings = np.flatnonzero(np.diff(pieces.bin, prepend=-1))
    firsts = list(zip(pieces.item[beginnings], pieces.first[beginnings], strict=True))
    assert firsts == sorted(firsts)
    assert all(array.dtype == np.int64 for array in (pieces.bin, pieces.item, pieces.first, pieces.last))


@pytest.mark.parametrize("way", ["online", "offline"])
@settings(max_examples=100, deadline=None)
@given(lengths=lengths_of_items, capacity=capacities)
def test_only_what_is_longer_than_a_bin_is_cut_and_into_as_few_pieces_as_can_be(
    way: str, lengths: np.ndarray, capacity: int
) -> None:
    pieces = WAYS[way](lengths, capacity)
    assert np.array_equal(np.bincount(pieces.item, minlength=len(lengths)), -(-lengths // capacity))
    inner = pieces.last < lengths[pieces.item]
    assert ((pieces.last - pieces.first)[inner] == capacity).all()


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_of_items, capacity=capacities)
def test_concatenation_leaves_room_in_the_last_bin_only(lengths: np.ndarray, capacity: int) -> None:
    pieces = pack_concatenated(lengths, capacity)
    assert pieces.bins == bound(lengths, capacity)
    assert (pieces.used[:-1] == capacity).all()


# the decisions ------------------------------------------------------------------------------------------------------


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[int]:
    """What each bin holds, by the textbook: the longest first, each into the fullest bin that has room."""
    pieces = [min(capacity, length - first) for length in lengths.tolist() for first in range(0, length, capacity)]
    bins: list[int] = []
    for size in sorted(pieces, reverse=True):
        rooms = [(capacity - used, number) for number, used in enumerate(bins) if capacity - used >= size]
        if rooms:
            bins[min(rooms)[1]] += size
        else:
            bins.append(size)
    return bins


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=200).map(lambda values: np.asarray(values, dtype=np.int64)),
    capacity=st.integers(1, 48),
)
def test_offline_fills_bins_as_best_fit_decreasing_does(lengths: np.ndarray, capacity: int) -> None:
    assert sorted(pack_offline(lengths, capacity).used.tolist()) == sorted(best_fit_decreasing(lengths, capacity))


def test_offline_fills_bins_as_best_fit_decreasing_does_for_documents() -> None:
    lengths = lognormal(3000)
    for capacity in (512, 2048):
        assert sorted(pack_offline(lengths, capacity).used.tolist()) == sorted(best_fit_decreasing(lengths, capacity))


def best_fit_in_order(lengths: np.ndarray, capacity: int, open_bins: int) -> list[int]:
    """The bin of each item, by the textbook: into the fullest of the open bins that has room, the oldest of equals."""
    used: list[int] = []
    opened: list[int] = []
    places = []
    for size in lengths.tolist():
        rooms = [(capacity - used[number], number) for number in opened if capacity - used[number] >= size]
        if rooms:
            number = min(rooms)[1]
            used[number] += size
        else:
            number = len(used)
            used.append(size)
            opened.append(number)
        places.append(number)
        opened = [number for number in opened if used[number] < capacity]
        if len(opened) > open_bins:
            opened.remove(min(opened, key=lambda number: (capacity - used[number], number)))
    return places


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=120).map(lambda values: np.asarray(values, dtype=np.int64)),
    open_bins=st.integers(1, 6),
)
def test_online_puts_each_item_where_best_fit_over_its_open_bins_does(lengths: np.ndarray, open_bins: int) -> None:
    pieces = pack_online(lengths, 20, open_bins)
    expected = best_fit_in_order(lengths, 20, open_bins)
    assert pieces.bin[np.argsort(pieces.item)].tolist() == expected


def test_more_open_bins_leave_less_room() -> None:
    lengths = lognormal(20_000)
    bins = [pack_online(lengths, 2048, open_bins).bins for open_bins in (1, 8, 64)]
    assert bins == sorted(bins, reverse=True)
    assert bins[0] > 1.05 * bins[-1]


def test_online_leaves_less_than_half_a_percent_empty() -> None:
    for capacity in (2048, 8192):
        lengths = lognormal(60_000)
        assert 0 < 1 - int(lengths.sum()) / (pack_online(lengths, capacity).bins * capacity) < 0.005


def test_offline_takes_at_most_a_hundredth_of_a_percent_more_bins_than_must_be() -> None:
    for capacity in (2048, 8192):
        lengths = lognormal(200_000)
        assert bound(lengths, capacity) <= pack_offline(lengths, capacity).bins <= 1.0001 * bound(lengths, capacity)


def test_long_bins_and_many_of_them_are_sorted_right() -> None:
    """Numbers of more than sixteen bits, which are sorted sixteen at a time."""
    lengths = np.random.default_rng(0).integers(60_000, 100_000, size=70_000)
    pieces = pack_offline(lengths, 100_000)
    assert pieces.bins == 70_000
    assert np.array_equal(pieces.bin, np.arange(70_000))
    assert np.array_equal(pieces.item, np.arange(70_000))


# corners ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_items_that_fill_bins_exactly_lie_in_order(way: str) -> None:
    pieces = WAYS[way](np.array([8, 16, 0, 8]), 8)
    assert pieces.bin.tolist() == [0, 1, 2, 3]
    assert pieces.item.tolist() == [0, 1, 1, 3]
    assert pieces.first.tolist() == [0, 0, 8, 0]
    assert pieces.last.tolist() == [8, 8, 16, 8]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("lengths", "capacity", "told"),
    [
        (np.array([1, -2]), 8, "item 1 has the length -2"),
        (np.array([1.5]), 8, "one integer per item, not float64"),
        (np.ones((2, 2), dtype=np.int64), 8, r"of shape \(2, 2\)"),
        (np.array([1]), 0, "at least one unit"),
    ],
)
def test_what_are_no_lengths_is_refused(way: str, lengths: np.ndarray, capacity: int, told: str) -> None:
    with pytest.raises(DataError, match=told):
        WAYS[way](lengths, capacity)


def test_no_open_bin_is_refused() -> None:
    with pytest.raises(DataError, match="open_bins=0"):
        pack_online(np.array([1]), 8, 0)
