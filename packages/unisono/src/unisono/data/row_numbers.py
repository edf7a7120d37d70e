"""Finds a row in a sequence of parts: files, blocks, record batches, windows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def locate_row(ends: NDArray[np.int64], row: int) -> tuple[int, int]:
    """The part that contains a row, and the row's number in that part.

    Args:
        ends: number of rows up to the end of each part, (parts,).
        row: number of the row.

    Raises:
        IndexError: for a row that is not there.

    >>> locate_row(np.array([3, 3, 5]), 4)
    (2, 1)
    """
    rows = int(ends[-1]) if len(ends) else 0
    if not 0 <= row < rows:
        raise IndexError(f"row {row} of {rows}")
    part = int(ends.searchsorted(row, side="right"))
    return part, int(row) - (int(ends[part - 1]) if part else 0)
