"""What is told of predictions, from means over all held-out rows or pairs: no average of averages."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MOMENTS = ("predicted", "true", "predicted²", "true²", "product")


def summary(values: Mapping[str, float]) -> dict[str, float]:
    """The values, with a correlation, a ratio of standard deviations and R² in place of each set of moments.

    Args:
        values: metrics by name; those of a set are called `name/predicted`, `name/true`, `name/predicted²`,
            `name/true²`, `name/product`, before which an average of weights may have put a word.

    Returns:
        `name/correlation` (0 where either is constant), `name/sd_ratio`, predicted over true, `name/r2`, against the
        mean of these very rows, and `name/bias`, by which predictions are too high; the other values as they are.
    """
    made = {name: value for name, value in values.items() if not name.endswith(tuple(f"/{end}" for end in _MOMENTS))}
    for key in values:
        if not key.endswith("/product"):
            continue
        name = key.removesuffix("/product")
        x, y, xx, yy, xy = (values[f"{name}/{end}"] for end in _MOMENTS)
        spread_x, spread_y = math.sqrt(max(0.0, xx - x * x)), math.sqrt(max(0.0, yy - y * y))
        both = spread_x * spread_y
        made[f"{name}/bias"] = x - y
        made[f"{name}/correlation"] = (xy - x * y) / both if both else 0.0
        made[f"{name}/sd_ratio"] = spread_x / spread_y if spread_y else 0.0
        made[f"{name}/r2"] = 1 - (xx - 2 * xy + yy) / spread_y**2 if spread_y else 0.0
    return made
