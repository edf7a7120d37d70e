"""Groups rows of similar length within a global batch, so that micro-batches hold little padding.

Which rows a global batch has does not change, so neither does its gradient. Where they stand follows from their lengths
alone, so it is the same on any layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.data.order.order import Indices


@dataclass(frozen=True, eq=False)
class LengthGroups:
    """Groups of rows of similar length.

    Attributes:
        lengths: units of each row of the source, (rows,).
        size: rows of a group.
    """

    lengths: Indices
    size: int

    def __call__(self, rows: Indices) -> Indices:  # (n,) -> (n,)
        """Which row of a global batch stands at each place.

        Rows are sorted, the longest first, and cut into groups. These are dealt to the halves of the batch, and in them
        to their halves, as in a snake draft, so that the share of each process has as much to compute as the others.

        >>> LengthGroups(np.array([10, 20, 30, 40, 50, 60, 70, 80]), 2)(np.arange(8)).tolist()
        [7, 6, 1, 0, 5, 4, 3, 2]
        """
        by_length = np.argsort(-self.lengths[rows], kind="stable")
        groups = list(range(-(-len(rows) // self.size)))
        return np.concatenate([by_length[number * self.size : (number + 1) * self.size] for number in _deal(groups)])


def _deal(groups: list[int]) -> list[int]:
    """Groups in an order in which each half, quarter, … has as long ones as the others."""
    if len(groups) < 3:
        return groups
    first = [group for place, group in enumerate(groups) if place % 4 in (0, 3)]
    second = [group for place, group in enumerate(groups) if place % 4 in (1, 2)]
    return [*_deal(first), *_deal(second)]
