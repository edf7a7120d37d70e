"""Curves small enough for a page: of many points, those that a reader would see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_NOT_CURVES = frozenset({"step", "eval", "rows", "skipped_rows", "masked"})


def collect_series(events: Sequence[Mapping[str, Any]], most: int) -> dict[str, tuple[list[float], list[float | None]]]:
    """The curve of every number in some events: x and y by name, thinned to about `most` points.

    A value that was not finite is a gap.
    """
    columns: dict[str, tuple[list[int], list[float | None]]] = {}
    for event in events:
        for name, value in event.items():
            if name in _NOT_CURVES or isinstance(value, bool) or not isinstance(value, int | float | None):
                continue
            x, y = columns.setdefault(name, ([], []))
            x.append(event["step"])
            y.append(float(value) if value is not None and math.isfinite(value) else None)
    return {name: thin(x, y, most) for name, (x, y) in columns.items() if any(value is not None for value in y)}


def thin(x: Sequence[int], y: Sequence[float | None], most: int) -> tuple[list[float], list[float | None]]:
    """A curve of at most `most` points: the smallest and the largest value of each stretch, so that no spike is lost.

    >>> thin([1, 2, 3, 4, 5, 6], [1, 9, 1, 1, 0, 1], 4)
    ([1, 2, 5, 6], [1.0, 9.0, 0.0, 1.0])
    """
    if len(x) <= most:
        return list(x), list(y)
    stretches = max(1, most // 2)
    kept: list[int] = []
    for number in range(stretches):
        stretch = range(number * len(x) // stretches, (number + 1) * len(x) // stretches)
        known = [(value, place) for place in stretch if (value := y[place]) is not None]
        chosen = {min(known)[1], max(known)[1]} if known else {stretch[0]}
        kept += sorted(chosen)
    return [x[place] for place in kept], [_round(y[place]) for place in kept]


def _round(value: float | None) -> float | None:
    """Six digits: more than a picture shows, and half the bytes."""
    return None if value is None else float(f"{value:.6g}")
