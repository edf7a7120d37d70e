"""Rows of a micro-batch by their places: some of them, in another order, or one in place of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_per_row(array: Any, rows: int) -> bool:
    """Whether an array has one entry for each row."""
    return getattr(array, "ndim", 0) > 0 and len(array) == rows


def take_rows(arrays: Mapping[str, Any], count: int, places: Sequence[int]) -> dict[str, Any]:
    """Copies of the rows at these places, of arrays that have one for each of `count`; others as they are."""
    chosen = list(places)
    return {name: array[chosen] if is_per_row(array, count) else array for name, array in arrays.items()}
