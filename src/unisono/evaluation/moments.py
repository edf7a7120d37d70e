"""Correlations, R² and the like of an evaluation: not means themselves, but computed from means over all rows.

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
        name: put before each metric.
        predicted: values of any shape.
        true: of the same shape, finite everywhere.
        weight: of the same shape; 0 for values that are not known.
        count: what the sums are divided by; None for the sum of the weights.
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
    """The values of an evaluation, with what follows from each set of moments in place of it.

    Args:
        values: by name, as `Task.summary` is given them; an average of weights may have put a word before a name.

    Returns:
        `name/correlation` (0 where either is constant), `name/sd_ratio`, predicted over true, `name/r2`, against the
        mean of these very rows, and `name/bias`, by which predictions are too high; the other values as they are.
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
