"""What observers are shown of a step that devices have computed in one program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unisono.data.loading.loader import MicroBatch


def local_outputs(outputs: Any, batches: Sequence[MicroBatch]) -> Iterator[Any]:
    """What the task returned for each micro-batch of this process, without rows that pad.

    Args:
        outputs: of all devices, (passes, devices, rows, …).
        batches: of this process, one device's after the other's.
    """
    own = jax.tree.map(_own, outputs)
    for place, micro in enumerate(batches):
        yield jax.tree.map(lambda array, at=place, size=micro.size: _cut(array[at], size), own)


def _own(array: jax.Array) -> np.ndarray[Any, Any]:
    """This process's part, (micro-batches, rows, …) in the order of the devices."""
    pieces = sorted(array.addressable_shards, key=lambda piece: piece.index[1].start or 0)
    return np.concatenate([np.asarray(piece.data)[:, 0] for piece in pieces])


def _cut(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return array[:size] if array.ndim and len(array) > size else array
