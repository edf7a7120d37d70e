"""Which micro-batch fits a limit of memory: a line through a few measured peaks, and which size to measure next.

Peaks grow linearly with the rows of a micro-batch, on top of what weights, gradients and optimizer take, and of few
rows another part of a run may be the peak. Sizes are measured from the smallest upwards, and none that may not fit: so
many times the rows take at most so many times the memory, and further than that a line is followed only once two of
its pieces have the same slope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MARGIN = 0.03  # of the limit, that is left free: peaks of equal steps differ by about 1 %
_MAX_GROWTH = 4  # at most, from one size to the next
_SLOPE_TOLERANCE = 0.2  # of two slopes


@dataclass(frozen=True)
class MemoryLine:
    """Bytes of a peak by rows.

    Attributes:
        base: of no row.
        per_row: of each.
    """

    base: float
    per_row: float

    @classmethod
    def fit(cls, peaks: Mapping[int, float]) -> MemoryLine:
        """The line of least squares through the three largest sizes, or steeper: through the last two."""
        sizes = sorted(peaks)[-3:]
        last = sizes[-1]
        if len(sizes) == 1:
            return cls(peaks[last], 0.0)
        middle, level = sum(sizes) / len(sizes), sum(peaks[size] for size in sizes) / len(sizes)
        slope = sum((size - middle) * (peaks[size] - level) for size in sizes) / sum((s - middle) ** 2 for s in sizes)
        steepest = max(0.0, slope, (peaks[last] - peaks[sizes[-2]]) / (last - sizes[-2]))
        return cls(peaks[last] - steepest * last, steepest)

    def rows(self, room: float) -> float:
        """The rows whose peak is a number of bytes; infinite where rows take none."""
        return (room - self.base) / self.per_row if self.per_row else float("inf")


def usable_bytes(limit: float) -> float:
    """What of a limit may be used."""
    return (1 - MARGIN) * limit


def next_size(sizes: Sequence[int], peaks: Mapping[int, float], room: float, failed: float) -> int | None:
    """The size to measure next, None if it is known which is the largest that fits.

    Args:
        sizes: that can be chosen, the smallest first.
        peaks: bytes by size, of those that were measured.
        room: bytes that may be used.
        failed: the smallest size that ran out of memory.
    """
    open_ = [size for size in sizes if size < failed]
    if not peaks:
        return open_[0] if open_ else None
    largest = max(peaks)
    fitting = [size for size, peak in peaks.items() if peak <= room]
    if not fitting:
        return None
    line = MemoryLine.fit(peaks) if len(peaks) > 1 else MemoryLine(-1.0, 0.0)  # one peak says nothing of more rows
    wanted = [size for size in open_ if size > max(fitting) and size not in peaks and size <= line.rows(room)]
    if peaks[largest] > room:  # between what fits and what does not
        wanted = [size for size in wanted if size < largest]
        return max(wanted, default=None)
    if failed < float("inf"):  # the line has promised too much
        return wanted[len(wanted) // 2] if wanted else None
    reach = min(_MAX_GROWTH, room / peaks[largest] if not _is_linear(peaks) else _MAX_GROWTH) * largest
    near = [size for size in wanted if size <= reach] if len(peaks) > 1 else []
    return max(near, default=min(wanted, default=None))


def _is_linear(peaks: Mapping[int, float]) -> bool:
    sizes = sorted(peaks)[-3:]
    slopes = [(peaks[b] - peaks[a]) / (b - a) for a, b in pairwise(sizes)]
    return len(slopes) == 2 and min(slopes) > 0 and max(slopes) - min(slopes) <= _SLOPE_TOLERANCE * max(slopes)


def largest_fitting(peaks: Mapping[int, float], room: float) -> int | None:
    """The largest size that was measured to fit."""
    return max((size for size, peak in peaks.items() if peak <= room), default=None)
