"""Packs items of different lengths into bins of equal capacity: best fit in order, best-fit-decreasing, or end to end.

Every packing decision depends on the previous one, so vectorising alone does not make it fast. Two things do:

* `pack_offline` decides for many items at once. Best fit chooses the bin with the least sufficient space. After that,
  the bin has even less space, so the next item of the same length goes there, too, if it fits. Hence a bin is filled
  with items of one length before another bin is touched, and a run of equal bins can be filled in one decision. The
  loop is over pairs of a length and a run of bins, whose number does not grow with the number of items.
* `pack_online` keeps few bins open, as a sorted list of integers that encode both the free space and the bin's number.

An item longer than a bin is first cut into full bins, and the rest is packed. Units are those of the given lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.data.order.order import Indices
from unisono.runtime.errors import DataError

_BITS = 32  # for a bin's number, below its free space
_NUMBER = (1 << _BITS) - 1


@dataclass(frozen=True)
class Pieces:
    """Which piece of which item is in which bin; arrays of shape (pieces,), sorted by bin and then by item.

    Bins are numbered in the order of the first item in them; none is empty.

    Attributes:
        bin: the bin of each piece.
        item: the item of each piece.
        first: its first unit.
        last: one past its last unit.
        bins: number of bins.
    """

    bin: Indices
    item: Indices
    first: Indices
    last: Indices
    bins: int

    def __len__(self) -> int:
        return len(self.bin)

    @property
    def used(self) -> Indices:
        """Units in each bin, (bins,)."""
        return np.bincount(self.bin, weights=self.last - self.first, minlength=self.bins).astype(np.int64)


def pack_online(lengths: Indices, capacity: int, open_bins: int = 64) -> Pieces:
    """Best fit in the items' order over a few open bins; if an item fits nowhere, a bin opens and the fullest closes.

    Args:
        lengths: units of each item, (items,); empty items are dropped.
        capacity: units per bin.
        open_bins: number of bins that are open at the same time.
    """
    if open_bins < 1:
        raise DataError(f"open_bins={open_bins}: at least one bin must be open")
    return _pack_cut(lengths, capacity, lambda sizes: _best_fit(sizes, capacity, open_bins))


def pack_offline(lengths: Indices, capacity: int) -> Pieces:
    """Best-fit-decreasing over all bins: exactly as many bins as the textbook algorithm.

    Args:
        lengths: units of each item, (items,); empty items are dropped.
        capacity: units per bin.
    """
    return _pack_cut(lengths, capacity, lambda sizes: _best_fit_decreasing(sizes, capacity))


def pack_concatenated(lengths: Indices, capacity: int) -> Pieces:
    """Concatenate items and cut them wherever a bin is full; only the last bin may have free space.

    Args:
        lengths: units of each item, (items,).
        capacity: units per bin.
    """
    lengths = _check_lengths(lengths, capacity)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    there = np.flatnonzero(lengths)
    first_bin, last_bin = starts[there] // capacity, (ends[there] - 1) // capacity
    item = np.repeat(there, last_bin - first_bin + 1)
    bin_ = _concatenate_ranges(first_bin, last_bin - first_bin + 1)
    first = np.maximum(bin_ * capacity, starts[item]) - starts[item]
    last = np.minimum((bin_ + 1) * capacity, ends[item]) - starts[item]
    return Pieces(bin_, item, first, last, int(bin_[-1]) + 1 if len(bin_) else 0)


# algorithms -------------------------------------------------------------------------------------------------------


def _best_fit(sizes: Indices, capacity: int, open_bins: int) -> Indices:  # (pieces,), below capacity -> (pieces,)
    """The bin of each piece. An open bin is encoded as free space · 2³² + number, so ties go to the oldest."""
    bins: list[int] = []
    place = bins.append
    free: list[int] = []  # ascending, at most `open_bins` of them
    opened = 0
    for size in (sizes << _BITS).tolist():
        at = bisect_left(free, size)
        if at < len(free):
            found = free.pop(at)
            place(found & _NUMBER)
            found -= size
            if found > _NUMBER:
                insort(free, found)
        else:
            place(opened)
            insort(free, (capacity << _BITS) - size + opened)
            opened += 1
            if len(free) > open_bins:
                del free[0]
    return np.asarray(bins, dtype=np.int64)


def _best_fit_decreasing(sizes: Indices, capacity: int) -> Indices:  # (pieces,), below capacity -> (pieces,)
    """The bin of each piece.

    Bins opened together form a run (first, bins), and runs are indexed by the free space of their bins. One decision
    puts the same number of pieces into each of a run's first bins.
    """
    order = _radix_argsort(capacity - sizes)
    per_length = np.bincount(sizes, minlength=1)
    smallest = int(sizes.min(initial=capacity))
    rooms: list[int] = []  # keys of `runs`, ascending
    runs: dict[int, list[tuple[int, int]]] = {}

    def keep(room: int, first: int, bins: int) -> None:
        if room < smallest:
            return  # too full for any piece
        if room in runs:
            runs[room].append((first, bins))
        else:
            runs[room] = [(first, bins)]
            insort(rooms, room)

    firsts: list[int] = []
    filled: list[int] = []
    each: list[int] = []
    opened = 0
    for length in np.flatnonzero(per_length)[::-1].tolist():
        left = int(per_length[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                same = runs[room]
                first, bins = same.pop()
                if not same:
                    del rooms[at], runs[room]
            else:
                room, first, bins = capacity, opened, -(-left // (capacity // length))
                opened += bins
            fit = room // length
            full = min(bins, left // fit)
            if full:
                firsts.append(first)
                filled.append(full)
                each.append(fit)
                keep(room - fit * length, first, full)
                left -= full * fit
                first += full
                bins -= full
            if left and bins:  # fewer than would fit into the next bin
                firsts.append(first)
                filled.append(1)
                each.append(left)
                keep(room - left * length, first, 1)
                left = 0
                first += 1
                bins -= 1
            if bins:
                keep(room, first, bins)
    bins_filled = _concatenate_ranges(np.asarray(firsts, dtype=np.int64), np.asarray(filled, dtype=np.int64))
    result = np.empty(len(sizes), dtype=np.int64)
    result[order] = np.repeat(bins_filled, np.repeat(np.asarray(each, dtype=np.int64), filled))
    return result


# helpers ---------------------------------------------------------------------------------------------------------


def _pack_cut(lengths: Indices, capacity: int, decide: Callable[[Indices], Indices]) -> Pieces:
    """Cut long items, apply the algorithm to pieces that do not fill a bin, and number and sort the bins."""
    lengths = _check_lengths(lengths, capacity)
    pieces = -(-lengths // capacity)
    item = np.repeat(np.arange(len(lengths)), pieces)
    first = _concatenate_ranges(np.zeros_like(pieces), pieces) * capacity
    last = np.minimum(first + capacity, lengths[item])
    sizes = last - first
    part = sizes < capacity
    bins = np.empty(len(sizes), dtype=np.int64)
    bins[part] = decide(sizes[part])
    opened = int(bins[part].max(initial=-1)) + 1
    bins[~part] = np.arange(opened, opened + len(sizes) - int(part.sum()))
    total = opened + len(sizes) - int(part.sum())
    places = np.arange(len(sizes))
    earliest = np.empty(total, dtype=np.int64)
    earliest[bins[::-1]] = places[::-1]  # for duplicate indices, the last assignment wins
    number = np.empty(total, dtype=np.int64)
    number[bins[earliest[bins] == places]] = np.arange(total)
    bins = number[bins]
    order = _radix_argsort(bins)
    return Pieces(bins[order], item[order], first[order], last[order], total)


def _check_lengths(lengths: Indices, capacity: int) -> Indices:
    if capacity < 1:
        raise DataError(f"capacity={capacity}: a bin must hold at least one unit")
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and len(lengths)):
        raise DataError(f"lengths must be one integer per item, not {lengths.dtype} of shape {lengths.shape}")
    if len(lengths) and lengths.min() < 0:
        raise DataError(f"item {int(lengths.argmin())} has the length {lengths.min()}")
    return lengths.astype(np.int64)


def _concatenate_ranges(starts: Indices, counts: Indices) -> Indices:  # (n,), (n,) -> (Σ counts,)
    """The concatenation of the ranges `start, start + 1, …` with these counts."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)


def _radix_argsort(values: NDArray[np.int64]) -> Indices:  # (n,), non-negative -> (n,)
    """A stable argsort, 16 bits at a time, since NumPy uses radix sort only for 16-bit integers."""
    order = np.argsort(values.astype(np.uint16), kind="stable")
    rest = values >> 16
    while rest.any():
        order = order[np.argsort(rest[order].astype(np.uint16), kind="stable")]
        rest >>= 16
    return order
