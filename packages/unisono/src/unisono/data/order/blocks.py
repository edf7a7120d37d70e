"""The order of sources that are read block by block: blocks are shuffled, then the rows within a window of blocks.

A full shuffle would read a block for nearly every row. Here each block is read once per epoch, by one lane, and a lane
has at most `window` blocks open. The price is that rows are mixed less well; a test measures how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np

from unisono.data.order.lanes import Lanes, group_equal
from unisono.data.order.order import Indices, Shuffle, apply_shuffles
from unisono.data.sources.cache import LruCache
from unisono.data.views import locate_row
from unisono.runtime.errors import DataError
from unisono.runtime.rng import key

T = TypeVar("T")


@dataclass(frozen=True)
class _LaneEpoch:
    """The blocks that a lane reads in an epoch, in reading order; arrays have shape (blocks,) except `windows`.

    Attributes:
        address: key of its random draws.
        ends: position in the epoch at which each block ends.
        starts: row of the source at which each block starts.
        sizes: rows of each block.
        windows: position at which each window starts, and finally the end.
    """

    address: int
    ends: Indices
    starts: Indices
    sizes: Indices
    windows: Indices

    def shuffle(self, window: int) -> Shuffle:
        """The permutation of the rows of a window."""
        size = int(self.windows[window + 1] - self.windows[window])
        return Shuffle(size, key(self.address, "window", window))

    def rows(self, places: Indices) -> Indices:  # (n,) -> (n,)
        """Rows of the source at these positions, before windows are shuffled."""
        block = np.searchsorted(self.ends, places, side="right")
        return self.starts[block] + places - (self.ends[block] - self.sizes[block])


def _memoised(compute: Callable[..., T]) -> Callable[..., T]:
    """Memoise what a method computes from the settings alone; concurrent threads may compute it twice."""

    @wraps(compute)
    def get(order: BlockOrder, *arguments: int) -> T:
        kept = order._kept
        found: T | None = kept.get(what := (compute.__name__, *arguments))
        if found is None:
            if len(kept) > 4 * order.lanes.count + 8:
                kept.clear()
            found = kept[what] = compute(order, *arguments)
        return found

    return get


@dataclass(frozen=True, eq=False)
class BlockOrder:
    """Maps positions to rows of a source whose blocks are assigned to lanes; a `Stream`.

    A *cycle* has as many epochs as there are lanes. In each cycle, blocks are permuted and dealt into one group per
    lane, the largest blocks first, so that groups differ by at most one block. In epoch `e` of a cycle, lane `l` reads
    group `(l - e) mod lanes`, with its blocks in an order specific to that epoch. So every block is read once per
    epoch. Since each lane reads every row once per cycle, the epoch of any position in a lane can be computed from the
    cycle's groups alone.

    Attributes:
        sizes: rows of each block, shape (blocks,), in source order.
        seed: of the run.
        window: number of blocks whose rows are shuffled together.
        lanes: that read the blocks.
    """

    sizes: Indices
    seed: int
    window: int
    lanes: Lanes
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", np.asarray(self.sizes, dtype=np.int64))
        if self.sizes.sum() < 1:
            raise DataError("the source has no rows")
        if self.sizes.min() < 0:
            raise DataError(f"block {int(self.sizes.argmin())} of the source has {int(self.sizes.min())} rows")

    @cached_property
    def size(self) -> int:
        """Rows of the source."""
        return int(self.sizes.sum())

    def __call__(self, positions: Indices) -> Indices:  # (n,) -> (n,)
        """Rows at these positions."""
        return self.locate(positions)[0]

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """Rows and epochs at these positions."""
        # From lanes to epochs to windows, then all windows' permutations at once, then to rows.
        lanes, places = self.lanes(np.asarray(positions, dtype=np.int64))
        cycles, places = np.divmod(places, self.size)
        epochs, which = np.empty_like(places), np.empty_like(places)
        windows: list[tuple[_LaneEpoch, int, Indices]] = []
        for of_lane in group_equal(cycles * self.lanes.count + lanes):
            cycle, lane = int(cycles[of_lane[0]]), int(lanes[of_lane[0]])
            ends = self._ends(cycle, lane)  # (lanes,)
            within = np.searchsorted(ends, places[of_lane], side="right")
            epochs[of_lane] = cycle * self.lanes.count + within
            places[of_lane] -= np.where(within > 0, ends[within - 1], 0)
            for of_epoch in (of_lane[these] for these in group_equal(within)):
                reading = self._lane_epoch(int(epochs[of_epoch[0]]), lane)
                window = np.searchsorted(reading.windows, places[of_epoch], side="right") - 1
                places[of_epoch] -= reading.windows[window]
                for these in group_equal(window):
                    which[of_epoch[these]] = len(windows)
                    windows.append((reading, int(window[these[0]]), of_epoch[these]))
        places = apply_shuffles(places, which, [reading.shuffle(number) for reading, number, _ in windows])
        rows = np.empty_like(places)
        for reading, number, here in windows:
            rows[here] = reading.rows(places[here] + reading.windows[number])
        return rows, epochs

    def rows_before(self, lane: int, epoch: int) -> int:
        """Number of positions of a lane before an epoch."""
        cycle, within = divmod(epoch, self.lanes.count)
        return cycle * self.size + (int(self._ends(cycle, lane)[within - 1]) if within else 0)

    def lanes_end_together(self, epochs: float, places: int) -> bool:
        """Whether every row was read `epochs` times, rounded down or up, after `places` positions of each lane."""
        few, many = math.floor(epochs), math.ceil(epochs)
        lanes = range(self.lanes.count)
        return all(self.rows_before(lane, few) <= places <= self.rows_before(lane, many) for lane in lanes)

    @_memoised
    def _groups(self, cycle: int) -> tuple[Indices, Indices]:
        """The blocks in dealing order, (blocks,), and the number of rows of each group, (lanes,)."""
        lanes, blocks = self.lanes.count, np.arange(len(self.sizes), dtype=np.int64)
        dealt = Shuffle(len(blocks), key(self.seed, "blocks", cycle))(blocks)
        dealt = dealt[np.argsort(-self.sizes[dealt], kind="stable")]
        return dealt, np.array([self.sizes[dealt[group::lanes]].sum() for group in range(lanes)], dtype=np.int64)

    @_memoised
    def _ends(self, cycle: int, lane: int) -> Indices:  # -> (lanes,)
        """Where each epoch of a lane ends, counted from the beginning of the cycle."""
        lanes = self.lanes.count
        return np.cumsum(self._groups(cycle)[1][(lane - np.arange(lanes)) % lanes])

    @_memoised
    def _lane_epoch(self, epoch: int, lane: int) -> _LaneEpoch:
        lanes = self.lanes.count
        cycle, within = divmod(epoch, lanes)
        group = self._groups(cycle)[0][(lane - within) % lanes :: lanes]
        address = key(self.seed, "lane", epoch, lane)
        blocks = group[Shuffle(len(group), address)(np.arange(len(group), dtype=np.int64))]
        ends = np.cumsum(self.sizes[blocks])
        windows = np.append(np.insert(ends[self.window - 1 :: self.window], 0, 0), ends[-1])
        return _LaneEpoch(address, ends, self._starts[blocks], self.sizes[blocks], windows)

    @cached_property
    def _starts(self) -> Indices:
        return np.cumsum(self.sizes) - self.sizes


class CachedBlocks:
    """The rows of a source that can only read whole blocks, with a cache of recent blocks. Thread-safe.

    Args:
        source: with `blocks` (rows per block) and `read_block(number)`, which returns the rows of a block.
        capacity: number of blocks to cache; see `keep_blocks`.
    """

    def __init__(self, source: Any, capacity: int = 2) -> None:
        self._source = source
        self._ends = np.cumsum(np.asarray(source.blocks, dtype=np.int64))
        self._open = LruCache[Sequence[Any]](budget=0, least=capacity)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Any:
        block, inside = locate_row(self._ends, row)
        return self._open.get(block, lambda: self._source.read_block(block))[inside]

    def keep_blocks(self, count: int) -> None:
        """Set the number of blocks to cache: those open at a time, and some of the next ones."""
        self._open.least = count

    def __getattr__(self, name: str) -> Any:  # lengths, blocks, fingerprint and other attributes of the source
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __reduce__(self) -> Any:  # another process has its own cache
        return CachedBlocks, (self._source, self._open.least)
