"""The best of every value that evaluations reported, and after which step.

A value's name does not say whether less or more is better, so both extremes are kept. A checkpoint saves them, so a
run that was interrupted has the same as one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Best:
    """The least and the most of each value so far.

    Args:
        kept: what `state` returned before.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self._extremes: dict[str, dict[str, list[float]]] = {
            name: {end: list(at) for end, at in ends.items()} for name, ends in (kept or {}).items()
        }

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Include an evaluation after `step` updates; of equal values the first is kept, and NaN is ignored."""
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            ends = self._extremes.setdefault(name, {"least": [value, step], "most": [value, step]})
            if value < ends["least"][0]:
                ends["least"] = [value, step]
            if value > ends["most"][0]:
                ends["most"] = [value, step]

    def state(self) -> dict[str, Any]:
        """By name of a value: `least` and `most`, each with its step."""
        return {name: {end: list(at) for end, at in ends.items()} for name, ends in self._extremes.items()}
