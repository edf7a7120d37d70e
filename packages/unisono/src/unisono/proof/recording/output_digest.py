"""What a task's forward pass returns, kept as a few numbers per array, and what two passes say about a model.

A sketch of an array is its norm and its products with four vectors of random signs: a difference d changes each
product by about ‖d‖, so sketches show it as the arrays would, and are small enough to be gathered from all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.runtime import rng

_SIGNS = 4
Array = NDArray[Any]
Sketch = list[float]


def build_sketch(array: Array) -> Sketch:
    """Norm, and products with vectors of random signs."""
    real = np.stack([array.real, array.imag], axis=-1) if np.iscomplexobj(array) else array
    values = real.astype(np.float64).ravel()
    bits = rng.generator("sketch").integers(0, 1 << _SIGNS, values.size, dtype=np.uint8)
    return [float(np.linalg.norm(values)), *(float(values @ (1.0 - 2.0 * (bits >> k & 1))) for k in range(_SIGNS))]


def build_sketches(arrays: Mapping[str, Array]) -> dict[str, Sketch]:
    """Of every array by name."""
    return {name: build_sketch(array) for name, array in arrays.items()}


def sketch_distance(mine: Mapping[str, Sketch], reference: Mapping[str, Sketch]) -> tuple[float, str]:
    """The largest relative difference of two forward passes, and the array that has it."""
    worst = 0.0, ""
    for name in {**reference, **mine}:
        a, b = mine.get(name), reference.get(name)
        if a is None or b is None:
            return math.inf, name
        if a != b:
            size = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(a[0], b[0])
            worst = max(worst, (size if math.isfinite(size) else math.inf, name))
    return worst


def row_differs(first: Mapping[str, Array], second: Mapping[str, Array], row: int, rows: int, floor: float) -> bool:
    """Whether a row differs by more than rounding, `floor`; other arguments as for `row_distance`."""
    return row_distance(first, second, row, rows)[0] > floor


def row_distance(first: Mapping[str, Array], second: Mapping[str, Array], row: int, rows: int) -> tuple[float, str]:
    """The largest relative difference of a row between two passes in which only the other rows differ, and its array.

    Args:
        first: outputs of a micro-batch by name.
        second: outputs of one that has the same row at the same place.
        row: its place.
        rows: of both micro-batches; arrays with another first axis are not looked at.
    """
    worst = 0.0, ""
    for (name, a), b in zip(first.items(), second.values(), strict=False):
        if a.ndim and a.shape == b.shape and len(a) == rows and np.issubdtype(a.dtype, np.floating):
            mine, other = a[row].astype(np.float64), b[row].astype(np.float64)
            change = float(np.linalg.norm(mine - other))
            if change > 0:
                worst = max(worst, (change / max(float(np.linalg.norm(mine)), float(np.linalg.norm(other))), name))
    return worst


def mixed_rows(whole: Mapping[str, Array], by_row: Mapping[str, Array], floor: float) -> str:
    """An array that has the right numbers in the wrong rows, as a reshape that joins axes in another order leaves it.

    Args:
        whole: outputs of a micro-batch by name.
        by_row: the same, each row made with copies of itself beside it, so that it has nothing of others.
        floor: relative difference that is rounding.

    Returns:
        Its name; empty where there is none.
    """
    for name, expected in by_row.items():
        found = whole.get(name)
        if found is None or found.shape != expected.shape or not np.issubdtype(found.dtype, np.floating):
            continue
        limit = floor * max(float(np.abs(expected).max(initial=0.0)), 1e-300)
        same = np.abs(np.sort(found, axis=None) - np.sort(expected, axis=None)).max(initial=0.0) <= limit
        if same and np.abs(found - expected).max(initial=0.0) > limit:
            return name
    return ""
