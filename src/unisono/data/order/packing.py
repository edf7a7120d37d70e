"""Items of different lengths into bins of one capacity: best fit in order, best fit the longest first, or end to end.

Packing is a chain of decisions, each of which needs the one before, so arrays alone do not make it fast. Two things do:

* `pack_offline` decides for many items at once. Best fit puts an item into the bin with the least free room that is
  enough; what is left of that room is less still, so the next item of the same length goes there, too, if it fits at
  all. Hence a bin takes as many items of one length as fit before another bin is touched, and a run of equal bins in a
  row can be filled in one decision. The loop is over (length, run of bins) and does not grow with the number of items.
* `pack_online` holds few bins open, as a sorted list of plain integers that are free room and number of the bin in one.

An item that is longer than a bin is cut into full bins first, and its tail is packed. Units are whatever lengths count.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.data.order.order import Indices
from unisono.runtime.errors import DataError

Cut = Literal["long", "never"]
_BITS = 32  # of a bin's number beside its free room
_NUMBER = (1 << _BITS) - 1


@dataclass(frozen=True)
class Pieces:
    """Which part of which item lies in which bin, each array of shape (pieces,), sorted by bin and then by item.

    Bins are numbered by the first item in them; none is empty.

    Attributes:
        bin: that it lies in.
        item: that it is a piece of.
        first: its first unit.
        last: one past its last unit.
        bins: how many there are.
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


def pack_online(lengths: Indices, capacity: int, open_bins: int = 64, cut: Cut = "long") -> Pieces:
    """Best fit in the items' order over a few open bins; where none has room, one is opened and the fullest is closed.

    Args:
        lengths: units of each item, (items,); items without any lie in no bin.
        capacity: units that a bin holds.
        open_bins: bins that are filled at the same time.
        cut: whether items longer than a bin are cut or refused.

    Raises:
        DataError: naming the item, with `cut="never"` for one that is longer than a bin.
    """
    if open_bins < 1:
        raise DataError(f"open_bins={open_bins}: at least one bin has to be open")
    return _pack_cut(lengths, capacity, cut, lambda sizes: _best_fit(sizes, capacity, open_bins))


def pack_offline(lengths: Indices, capacity: int, cut: Cut = "long") -> Pieces:
    """Best fit, the longest first, over all bins: as many as the textbook's best-fit-decreasing, to the last one.

    Args:
        lengths: units of each item, (items,); items without any lie in no bin.
        capacity: units that a bin holds.
        cut: whether items longer than a bin are cut or refused.

    Raises:
        DataError: naming the item, with `cut="never"` for one that is longer than a bin.
    """
    return _pack_cut(lengths, capacity, cut, lambda sizes: _best_fit_decreasing(sizes, capacity))


def pack_concatenated(lengths: Indices, capacity: int) -> Pieces:
    """One item after the other, cut wherever a bin is full; only the last bin can have room left.

    Args:
        lengths: units of each item, (items,).
        capacity: units that a bin holds.
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


# decisions --------------------------------------------------------------------------------------------------------


def _best_fit(sizes: Indices, capacity: int, open_bins: int) -> Indices:  # (pieces,), below capacity -> (pieces,)
    """The bin of each piece. An open bin is its free room · 2³² + its number, so that of equals the oldest is taken."""
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

    Bins that were opened together are a run (first, bins), and runs are kept by the free room of their bins. A
    decision fills a run: so many pieces into each of its first bins.
    """
    order = _radix_argsort(capacity - sizes)
    per_length = np.bincount(sizes, minlength=1)
    smallest = int(sizes.min(initial=capacity))
    rooms: list[int] = []  # ascending, those of which there is a run
    runs: dict[int, list[tuple[int, int]]] = {}

    def keep(room: int, first: int, bins: int) -> None:
        if room < smallest:
            return  # full, as far as these pieces go
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
            if left and bins:  # fewer than fit into the next bin
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


# around them ------------------------------------------------------------------------------------------------------


def _pack_cut(lengths: Indices, capacity: int, cut: Cut, decide: Callable[[Indices], Indices]) -> Pieces:
    """Cut, let the decisions be made for what does not fill a bin, and number and sort the bins."""
    lengths = _check_lengths(lengths, capacity)
    longest = int(lengths.argmax()) if len(lengths) else 0
    if cut == "never" and len(lengths) and lengths[longest] > capacity:
        raise DataError(
            f"item {longest} has {lengths[longest]} units, and a bin holds {capacity}; cut it (cut: long) or use "
            "larger bins"
        )
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
    earliest[bins[::-1]] = places[::-1]  # of several, the last one written stays
    number = np.empty(total, dtype=np.int64)
    number[bins[earliest[bins] == places]] = np.arange(total)
    bins = number[bins]
    order = _radix_argsort(bins)
    return Pieces(bins[order], item[order], first[order], last[order], total)


def _check_lengths(lengths: Indices, capacity: int) -> Indices:
    if capacity < 1:
        raise DataError(f"capacity={capacity}: a bin has to hold at least one unit")
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and len(lengths)):
        raise DataError(f"lengths are one integer per item, not {lengths.dtype} of shape {lengths.shape}")
    if len(lengths) and lengths.min() < 0:
        raise DataError(f"item {int(lengths.argmin())} has the length {lengths.min()}")
    return lengths.astype(np.int64)


def _concatenate_ranges(starts: Indices, counts: Indices) -> Indices:  # (n,), (n,) -> (Σ counts,)
    """`starts[0], starts[0] + 1, …` for each range, one range after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)


def _radix_argsort(values: NDArray[np.int64]) -> Indices:  # (n,), non-negative -> (n,)
    """The stable order of values, by 16 bits at a time: NumPy sorts those by their digits, and others by comparing."""
    order = np.argsort(values.astype(np.uint16), kind="stable")
    rest = values >> 16
    while rest.any():
        order = order[np.argsort(rest[order].astype(np.uint16), kind="stable")]
        rest >>= 16
    return order
