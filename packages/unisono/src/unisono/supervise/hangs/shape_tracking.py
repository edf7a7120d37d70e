"""Tracks micro-batch shapes: compiling for a new one may take long and must not count as a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.data.loading.micro_batch import MicroBatch
from unisono.runtime.heartbeat import NEW_SHAPE


class ShapeTracker:
    """The shapes seen so far.

    Args:
        watching: Whether shapes matter; without compilation a new shape takes no longer than a known one.
    """

    def __init__(self, watching: bool) -> None:
        self._watching = watching
        self._known: set[Any] = set()

    def update(self, batches: Sequence[MicroBatch]) -> str:
        """Return `heartbeat.NEW_SHAPE` if a micro-batch has a shape not seen before, else an empty string."""
        if not self._watching:
            return ""
        before = len(self._known)
        self._known.update(describe_shapes(micro.arrays) for micro in batches)
        return NEW_SHAPE if len(self._known) > before else ""


def describe_shapes(arrays: Any) -> Any:
    """Return the shape and dtype of every array in a batch, which may be nested.

    >>> import numpy
    >>> describe_shapes({"x": numpy.zeros((2, 3), dtype="f4"), "more": [numpy.zeros(1)]})
    (('more', (('1', 'float64'),)), ('x', ('2,3', 'float32')))
    """
    if isinstance(arrays, Mapping):
        return tuple((name, describe_shapes(arrays[name])) for name in sorted(arrays))
    if isinstance(arrays, list | tuple):
        return tuple(describe_shapes(array) for array in arrays)
    return ",".join(map(str, getattr(arrays, "shape", ()))), str(getattr(arrays, "dtype", ""))
