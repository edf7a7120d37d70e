"""Lanes: every position has one, and world sizes that divide them cut between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order.lanes import SINGLE_LANE, Lanes, group_equal, resolve_lane_count
from unisono.runtime.errors import ConfigError


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 30), stretch=st.integers(1, 20), first=st.integers(0, 10**15))
def test_lanes_and_places_are_positions_numbered_otherwise(count: int, stretch: int, first: int) -> None:
    lanes, positions = Lanes(count, stretch), first + np.arange(200)
    lane, place = lanes(positions)
    assert lane.min() >= 0
    assert lane.max() < count
    assert np.array_equal(lanes.positions(lane, place), positions)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 12), stretch=st.integers(1, 9))
def test_a_lane_has_all_of_its_places_once_and_in_order(count: int, stretch: int) -> None:
    for lanes in (Lanes(count, stretch), SINGLE_LANE):
        positions = np.arange(lanes.count * lanes.stretch * 5)
        lane, place = lanes(positions)
        for number in range(lanes.count):
            assert place[lane == number].tolist() == list(range(5 * lanes.stretch))


def test_alike_finds_the_places_of_each_number() -> None:
    assert [part.tolist() for part in group_equal(np.array([3, 1, 3, 2, 1]))] == [[1, 4], [3], [0, 2]]
    assert list(group_equal(np.zeros(0, dtype=np.int64))) == []


@pytest.mark.parametrize(
    ("batch", "blocks", "count"),
    [(64, None, 64), (48, None, 48), (100, None, 50), (97, None, 1), (64, 10, 8), (6, 1, 1)],
)
def test_where_nobody_says_lanes_are_the_largest_divisor_that_is_small_enough(
    batch: int, blocks: int | None, count: int
) -> None:
    assert resolve_lane_count(None, batch, 1, blocks) == count


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((5, 12, 1), r"lanes=5 does not divide .*=12.* These numbers do: \[1, 2, 3, 4, 6, 12\]"),
        ((6, 12, 4), r"world_size=4 .* 6 lanes .* do: \[1, 2, 3, 6\]; .*data\.lanes=4 or 12$"),
        ((12, 12, 1, 5), r"data\.lanes=12, but there are 5 blocks .* Use one of \[1, 2, 3, 4\], or"),
    ],
)
def test_lanes_that_do_not_fit_are_refused_with_the_numbers_that_do(asked: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_lane_count(*asked)


def test_every_world_size_that_divides_the_lanes_has_them() -> None:
    assert [resolve_lane_count(6, 12, world_size) for world_size in (1, 2, 3, 6)] == [6] * 4
