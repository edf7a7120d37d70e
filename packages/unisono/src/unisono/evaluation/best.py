"""The best of every value that evaluations reported, and its step.

A value's name does not say whether lower or higher is better, so both extremes are kept. They are saved in checkpoints,
so an interrupted run has the same ones as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from unisono.runtime.errors import ConfigError, nearest


class Best:
    """The minimum and maximum of each value so far.

    Args:
        kept: an earlier `state()` to restore.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._extremes: dict[str, dict[str, list[float]]] = {
            name: {end: list(at) for end, at in ends.items()} for name, ends in (kept or {}).items()
        }

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Include an evaluation after `step` updates. Of equal values the first is kept; non-finite are ignored."""
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            ends = self._extremes.setdefault(name, {"least": [value, step], "most": [value, step]})
            if value < ends["least"][0]:
                ends["least"] = [value, step]
            if value > ends["most"][0]:
                ends["most"] = [value, step]

    def state(self) -> dict[str, Any]:
        """For each value name, `least` and `most`, each with its step."""
        return {name: {end: list(at) for end, at in ends.items()} for name, ends in self._extremes.items()}


def require_metric(key: str, metric: str, names: Iterable[str]) -> None:
    """Reject a setting that names a metric which evaluations do not have.

    Raises:
        ConfigError: with the nearest metric.
    """
    known = list(names)
    if metric not in known:
        raise ConfigError(f"{key}={metric}: this task's evaluations have no such metric, {nearest(metric, known)}")
