"""Correlation, R² and similar values of an evaluation: not means themselves, but computed from means over all rows.

A loss reports the moments of predicted and true values as metrics, which are summed over rows, micro-batches and
processes like any metric; `Task.summary` turns them into readable values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MOMENTS = ("predicted", "true", "predicted²", "true²", "product")


def moments(name: str, predicted: Any, true: Any, weight: Any, count: Any = None) -> dict[str, tuple[Any, Any]]:
    """The absolute error and the moments of predicted and true values, as metrics of a `Loss`.

    Args:
        name: prefix of each metric.
        predicted: values of any shape.
        true: of the same shape, finite everywhere.
        weight: of the same shape; 0 for unknown values.
        count: the divisor of the sums; None for the sum of the weights.
    """
    values = {
        "error": abs(predicted - true),
        "predicted": predicted,
        "true": true,
        "predicted²": predicted * predicted,
        "true²": true * true,
        "product": predicted * true,
    }
    total = weight.sum() if count is None else count
    return {f"{name}/{what}": ((value * weight).sum(), total) for what, value in values.items()}


def summarise_moments(values: Mapping[str, float]) -> dict[str, float]:
    """The values of an evaluation, with each set of moments replaced by the values computed from it.

    Args:
        values: by name, as passed to `Task.summary`; names may have a prefix.

    Returns:
        `name/correlation` (0 if either is constant); `name/sd_ratio`, predicted over true; `name/r2`, relative to the
        mean of the same rows; `name/bias`, the mean of predicted minus true; and the other values unchanged.
    """
    found = {name: value for name, value in values.items() if not name.endswith(tuple(f"/{end}" for end in _MOMENTS))}
    for key in values:
        if not key.endswith("/product"):
            continue
        name = key.removesuffix("/product")
        x, y, xx, yy, xy = (values[f"{name}/{end}"] for end in _MOMENTS)
        spread_x, spread_y = math.sqrt(max(0.0, xx - x * x)), math.sqrt(max(0.0, yy - y * y))
        both = spread_x * spread_y
        found[f"{name}/bias"] = x - y
        found[f"{name}/correlation"] = (xy - x * y) / both if both else 0.0
        found[f"{name}/sd_ratio"] = spread_x / spread_y if spread_y else 0.0
        found[f"{name}/r2"] = 1 - (xx - 2 * xy + yy) / spread_y**2 if spread_y else 0.0
    return found
