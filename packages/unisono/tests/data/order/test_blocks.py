"""Blocks on lanes: each is read once per epoch by one lane, and the order is the same for every world size."""

from __future__ import annotations

import pickle
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.unisono.tests.data.made import OnlyBlocks
from unisono.data.order.blocks import BlockOrder, CachedBlocks
from unisono.data.order.lanes import SINGLE_LANE, Lanes
from unisono.data.order.order import Indices, Order
from unisono.runtime.errors import DataError

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any)
lanes = st.builds(Lanes, st.integers(1, 8), st.integers(1, 5))
seeds = st.integers(0, 99)


def autocorrelation(blocks: np.ndarray, batch: int) -> float:
    """How well the blocks of a batch predict those of the next batch.

    The autocorrelation of the number of rows that each block has in a batch, over all blocks: 0 if rows are drawn at
    random, 1 if all batches come from the same blocks.

    Args:
        blocks: the block of each row, in order of consumption, shape (rows,).
        batch: rows per batch; a short last batch is ignored.
    """
    steps = len(blocks) // batch
    names, numbers = np.unique(blocks[: steps * batch], return_inverse=True)
    shares = np.zeros((steps, len(names)))
    np.add.at(shares, (np.repeat(np.arange(steps), batch), numbers.reshape(-1)), 1)
    shares -= shares.mean(axis=0)
    power = np.square(shares).mean(axis=0).sum()
    return float((shares[1:] * shares[: steps - 1]).mean(axis=0).sum() / power) if power else 1.0


def block_of(sizes: Any, rows: Indices) -> Indices:
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def of_lane(blocks: BlockOrder, lane: int, places: Indices) -> tuple[Indices, Indices]:
    """The rows that a lane reads, and their epochs."""
    positions = blocks.lanes.positions(np.full(len(places), lane), places)
    return blocks.locate(positions)


# what is read ---------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(sizes=sizes, lanes=lanes, window=st.integers(1, 5), seed=seeds, first=st.integers(0, 20))
def test_in_each_epoch_every_row_is_read_once_and_every_block_by_one_lane(
    sizes: list[int], lanes: Lanes, window: int, seed: int, first: int
) -> None:
    blocks = BlockOrder(np.array(sizes), seed, window, lanes)
    readers: dict[tuple[int, int], set[int]] = {}
    read: dict[int, list[int]] = {epoch: [] for epoch in (first, first + 1)}
    for lane in range(lanes.count):
        begin, end = blocks.rows_before(lane, first), blocks.rows_before(lane, first + 2)
        rows, epochs = of_lane(blocks, lane, np.arange(begin, end))
        assert set(epochs.tolist()) <= {first, first + 1}
        for row, epoch in zip(rows.tolist(), epochs.tolist(), strict=True):
            read[epoch].append(row)
            readers.setdefault((epoch, int(block_of(sizes, row))), set()).add(lane)
    for rows_of_epoch in read.values():
        assert sorted(rows_of_epoch) == list(range(sum(sizes)))
    assert all(len(by) == 1 for by in readers.values())


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, lanes=lanes, window=st.integers(1, 5), seed=seeds)
def test_after_as_many_epochs_as_lanes_each_lane_has_read_everything(
    sizes: list[int], lanes: Lanes, window: int, seed: int
) -> None:
    blocks = BlockOrder(np.array(sizes), seed, window, lanes)
    for lane in range(lanes.count):
        rows, _ = of_lane(blocks, lane, blocks.size + np.arange(blocks.size))  # the second cycle
        assert np.array_equal(np.sort(rows), np.arange(sum(sizes)))
        assert blocks.rows_before(lane, 2 * lanes.count) == 2 * blocks.size


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, lanes=lanes, seed=seeds)
def test_no_lane_has_more_than_a_block_more_to_read_than_another(sizes: list[int], lanes: Lanes, seed: int) -> None:
    blocks = BlockOrder(np.array(sizes), seed, 2, lanes)
    ends = [blocks.rows_before(lane, 1) for lane in range(lanes.count)]
    assert max(ends) - min(ends) <= max(sizes)
    assert sum(ends) == sum(sizes)


@settings(max_examples=30, deadline=None)
@given(sizes=sizes, lanes=lanes, window=st.integers(1, 5), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_the_order_of_blocks_is_the_same_for_any_way_of_cutting_positions(
    sizes: list[int], lanes: Lanes, window: int, cuts: list[int]
) -> None:
    blocks, positions = BlockOrder(np.array(sizes), 3, window, lanes), np.arange(200)
    rows, epochs = blocks.locate(positions)
    pieces = np.split(positions, sorted(cuts))
    fresh = [BlockOrder(np.array(sizes), 3, window, lanes) for _ in pieces]  # a resume remembers nothing
    assert np.array_equal(np.concatenate([one(p) for one, p in zip(fresh, pieces, strict=True)]), rows)
    assert np.array_equal(np.concatenate([one.locate(p)[1] for one, p in zip(fresh, pieces, strict=True)]), epochs)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20])
def test_a_lane_has_no_more_than_a_window_of_blocks_open(window: int) -> None:
    sizes = np.full(24, 5)
    blocks = BlockOrder(sizes, 0, window, Lanes(2, 3))
    rows, _ = of_lane(blocks, 1, np.arange(60))  # one epoch: twelve blocks
    for start in range(0, 60, 5 * window):
        part = rows[start : start + 5 * window]
        assert len(set(block_of(sizes, part).tolist())) == -(-len(part) // 5)
        assert len(part) <= 5 or not (np.diff(part) > 0).all()


def test_each_epoch_has_its_own_blocks_order_and_rows() -> None:
    sizes = np.full(24, 5)
    blocks = BlockOrder(sizes, 0, 2, Lanes(2, 3))
    epochs = [of_lane(blocks, 0, 60 * epoch + np.arange(60))[0] for epoch in range(8)]
    assert len({tuple(rows.tolist()) for rows in epochs}) == 8
    groups = [frozenset(block_of(sizes, rows).tolist()) for rows in epochs]
    assert groups[0].isdisjoint(groups[1])
    assert len(set(groups)) == 8, "each cycle deals anew"


def test_each_lane_and_each_seed_reads_otherwise() -> None:
    positions = np.arange(60)
    orders = [tuple(BlockOrder(np.full(24, 5), seed, 2, Lanes(2, 3))(positions).tolist()) for seed in range(9)]
    assert len(set(orders)) == 9


def test_seeking_far_needs_no_memory() -> None:
    blocks = BlockOrder(np.full(100, 1000), 0, 8, Lanes(8, 4))
    blocks(np.arange(64))
    tracemalloc.start()
    rows = blocks(10**12 + np.arange(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(rows.tolist())) > 60
    assert peak < 500_000


def test_what_is_remembered_does_not_grow_with_the_epochs() -> None:
    blocks = BlockOrder(np.full(12, 5), 0, 2, Lanes(4, 1))
    for epoch in range(100):
        blocks(np.arange(60) + 60 * epoch)
        assert len(blocks._kept) <= 4 * 4 + 10


def test_the_order_of_blocks_is_pinned() -> None:
    """A change of these numbers would change every run over blocks that was ever interrupted."""
    rows = BlockOrder(np.array([3, 2, 4, 1]), 0, 2, Lanes(2, 2))(np.arange(12))
    assert rows.tolist() == [4, 8, 2, 9, 7, 3, 1, 0, 6, 5, 8, 4]


@pytest.mark.parametrize(
    ("sizes", "message"), [([], "no rows"), ([0, 0], "no rows"), ([3, -1, 2], "block 1 of the source has -1 rows")]
)
def test_blocks_that_cannot_be_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        BlockOrder(np.array(sizes, dtype=np.int64), 0, 2, SINGLE_LANE)


# how well they are mixed ----------------------------------------------------------------------------------------------

MANY = np.full(400, 20)  # 8000 rows


def told(rows: Indices, batch: int = 16) -> float:
    return autocorrelation(block_of(MANY, rows), batch)


def test_full_shuffle_leaves_no_trace_of_blocks() -> None:
    assert abs(told(Order(8000, 0)(np.arange(8000)))) < 0.02


@pytest.mark.parametrize(("blocks", "size"), [(400, 50), (1000, 20)])
@pytest.mark.parametrize(("lanes", "window"), [(16, 16), (16, 8), (4, 4), (1, 8)])
def test_blocks_in_windows_on_lanes_leave_exactly_the_trace_of_draws_without_replacement(
    blocks: int, size: int, lanes: int, window: int
) -> None:
    sizes = np.full(blocks, size)
    rows = BlockOrder(sizes, 0, window, Lanes(lanes, 16 // lanes))(np.arange(blocks * size))
    found = autocorrelation(block_of(sizes, rows), 16)
    assert found == pytest.approx(
        trace(blocks, size, lanes, window, 16 // lanes), abs=0.015
    )  # over seeds: 0.002 to 0.004


def trace(blocks: int, size: int, lanes: int, window: int, share: int) -> float:
    """What the autocorrelation of an epoch comes to: of each batch a lane draws `share` rows from those of its window.

    A block's rows in a batch have a hypergeometric law, two batches of one window share the factor of drawing two
    different rows, and the mean over the epoch is taken off. The last window of a lane can be shorter.
    """
    batches, each = blocks * size / (lanes * share), blocks // lanes
    covariance = power = 0.0
    for window_size in [window] * (each // window) + [each % window] * (each % window > 0):
        rows = window_size * size
        pair = size * (size - 1) / (rows * (rows - 1))
        mean = size * size / batches
        covariance += window_size * ((rows / share - 1) * share**2 * pair - mean)
        power += window_size * (rows / share * (share * size / rows + share * (share - 1) * pair) - mean)
    return covariance / power


def test_a_weak_shuffle_is_seen() -> None:
    """One reader, a small buffer: what a bird-song trainer had, whose batches said 0.8 of the next ones."""
    rng, buffer, rows = np.random.default_rng(0), list(range(40)), []
    for following in range(40, 8000):
        place = int(rng.integers(40))
        rows.append(buffer[place])
        buffer[place] = following
    assert 0.6 < told(np.array(rows)) < 0.95
    assert told(np.arange(8000), batch=4) > 0.7


def test_batches_of_the_same_block_correlate_wholly() -> None:
    assert autocorrelation(np.zeros(40, dtype=np.int64), 4) == 1.0


# reading block by block -----------------------------------------------------------------------------------------------


def test_a_cache_of_blocks_has_the_rows_of_its_source_and_the_rest_of_it() -> None:
    source = OnlyBlocks([3, 0, 2, 4])
    cached = CachedBlocks(source, 2)
    assert len(cached) == 9
    assert [cached[row] for row in range(9)] == list(range(9))
    assert cached[np.int64(4)] == 4
    assert cached.lengths is source.lengths
    assert cached.blocks is source.blocks
    assert source.read == [0, 2, 3]
    assert [cached[row] for row in (0, 3, 1, 4)] == [0, 3, 1, 4]
    assert source.read == [0, 2, 3, 0], "of two blocks, the one used last stays"
    for row in (-1, 9):
        with pytest.raises(IndexError):
            cached[row]
    with pytest.raises(AttributeError):
        _ = cached.fingerprint


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_each_block_is_read_once_per_epoch_by_one_process_on_any_world_size(world_size: int) -> None:
    sizes, lanes, batch, window = np.full(30, 4), Lanes(6, 2), 12, 2
    blocks = BlockOrder(sizes, 0, window, lanes)
    source = OnlyBlocks(sizes)
    ranks = [CachedBlocks(source, (window + 2) * 6 // world_size) for _ in range(world_size)]
    rows = []
    share = batch // world_size
    for step in range(120 // batch):
        for rank, cached in enumerate(ranks):
            positions = step * batch + rank * share + np.arange(share)
            rows += [cached[row] for row in blocks(positions).tolist()]
    assert sorted(rows) == list(range(120))
    assert sorted(source.read) == list(range(30))


def test_threads_that_want_the_same_block_read_it_once() -> None:
    source = OnlyBlocks([10, 10], slow=0.05)
    cached = CachedBlocks(source, 2)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(cached.__getitem__, [3, 4, 5, 13, 6, 14, 7, 15])) == [3, 4, 5, 13, 6, 14, 7, 15]
    assert sorted(source.read) == [0, 1]


def test_a_block_that_cannot_be_read_is_an_error_for_all_who_wait_and_is_tried_again() -> None:
    source = OnlyBlocks([2, 2])
    whole, broken = source.read_block, threading.Event()
    broken.set()

    def fails(number: int) -> list[int]:
        if broken.is_set():
            raise DataError("shard 0 is cut off")
        return whole(number)

    source.read_block = fails  # type: ignore[method-assign]
    cached = CachedBlocks(source, 2)
    for _ in range(2):
        with pytest.raises(DataError, match="shard 0 is cut off"):
            cached[0]
    broken.clear()
    assert cached[0] == 0


def test_another_process_opens_blocks_of_its_own() -> None:
    cached = CachedBlocks(OnlyBlocks([2, 2]), 1)
    assert cached[3] == 3
    again = pickle.loads(pickle.dumps(cached))
    assert [again[row] for row in range(4)] == [0, 1, 2, 3]
