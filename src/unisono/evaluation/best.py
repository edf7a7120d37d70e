"""The best of every value that evaluations have told, and after which step it was.

Whether less or more is better, the name of a value does not say, so both ends are kept. A checkpoint keeps them, so a
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
        self._seen: dict[str, dict[str, list[float]]] = {
            name: {end: list(at) for end, at in ends.items()} for name, ends in (kept or {}).items()
        }

    def see(self, step: int, values: Mapping[str, float]) -> None:
        """Take an evaluation after `step` updates in; of equal values the first stays, and NaN is none."""
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            ends = self._seen.setdefault(name, {"least": [value, step], "most": [value, step]})
            if value < ends["least"][0]:
                ends["least"] = [value, step]
            if value > ends["most"][0]:
                ends["most"] = [value, step]

    def state(self) -> dict[str, Any]:
        """By name of a value: `least` and `most`, each with the step after which it was told."""
        return {name: {end: list(at) for end, at in ends.items()} for name, ends in self._seen.items()}
