"""Pieces of named arrays, as which an engine passes on its state to be saved and reads it back.

Engines know about arrays and meshes, checkpoints about files; they share only names, global shapes and offsets, so a
checkpoint of one layout can be read by any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from unisono.engines import host_arrays
from unisono.engines.host_arrays import Array
from unisono.runtime.errors import CheckpointError

ADAM_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "step"})  # of a parameter, as torch's Adam names them


@dataclass(frozen=True)
class ArrayShard:
    """A rectangular piece of a named array.

    Attributes:
        name: unique in the state, e.g. `model/layers.0.mlp.weight` or `optimizer/layers.0.mlp.weight/exp_avg`.
        shape: of the whole array.
        offset: of this piece in it, one number per axis.
        data: the piece, a NumPy, torch or JAX array on any device; it may be the array being trained and change with
            the next step.
        finite: whether all values must be finite, as for parameters but not for buffers.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Any
    finite: bool = False


class StateReader(Protocol):
    """Saved arrays that can be read piece by piece."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every saved array by name."""

    def covers(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether the saved pieces cover every element of a piece."""

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """The piece of an array that begins at `offset`, in its saved dtype."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype in which an array was saved."""

    def fill(self, name: str, offset: tuple[int, ...], into: Array) -> None:
        """Read the piece of an array that begins at `offset` into a contiguous array of its shape and dtype."""


def check_dtype(name: str, saved: np.dtype[Any], mine: str) -> None:
    """Refuse an array of another kind of numbers than the model's: its values would be converted in silence.

    Between floating-point dtypes the setting of the precision asks for a conversion, and a JAX process without 64-bit
    numbers for one of counters.

    Args:
        name: of the array.
        saved: the dtype in which it was saved.
        mine: the name of the dtype into which it is read.

    Raises:
        CheckpointError: naming the array and both dtypes.
    """
    kinds = [_kind(saved), _kind(host_arrays.parse_dtype(mine))]
    if saved.name != mine and (kinds[0] != kinds[1] or kinds[0] not in "fci"):
        raise CheckpointError(
            f"'{name}' is {saved.name} in the checkpoint and {mine} in the model; it is from another model, or forged"
        )


def _kind(dtype: np.dtype[Any]) -> str:
    return "f" if host_arrays.is_ml_dtype(dtype) and "float" in dtype.name else dtype.kind


def check_arrays(mine: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a checkpoint has exactly the expected arrays, given the shapes of both by name.

    Raises:
        CheckpointError: naming arrays that are missing, unexpected, or of another shape.
    """
    missing = [name for name in mine if name not in saved]
    unexpected = [name for name in saved if name not in mine]
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint does not match the model: missing {missing[:4] or 'nothing'}, unexpected "
            f"{unexpected[:4] or 'nothing'} ({len(missing)} and {len(unexpected)} in all)"
        )
    for name, shape in mine.items():
        if tuple(shape) != tuple(saved[name]):
            raise CheckpointError(f"'{name}' has shape {saved[name]} in the checkpoint, but {shape} in the model")
