"""Pieces of named arrays: what an engine hands over to be saved, and how it asks for it back.

Engines know arrays and meshes, checkpoints know files; between them stand only names, global shapes and offsets, so a
checkpoint of one layout can be read by any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from unisono.engines.host_arrays import Array


@dataclass(frozen=True)
class Shard:
    """A rectangular piece of a named array.

    Attributes:
        name: unique in the state, e.g. `model/layers.0.mlp.weight` or `optimizer/layers.0.mlp.weight/exp_avg`.
        shape: of the whole array.
        offset: of this piece in it, one number per axis.
        data: the piece itself, an array of NumPy, torch or JAX on whatever device; it may be what is trained, and change
            with the next step.
        finite: whether numbers in it that are not finite are a fault, as in parameters; a buffer may hold them.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Any
    finite: bool = False


class Reader(Protocol):
    """Saved arrays, readable by the piece."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every saved array by name."""

    def covers(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether the saved pieces have every element of a piece."""

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """The piece of an array that begins at `offset`, in its saved dtype."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """In which an array was saved."""

    def fill(self, name: str, offset: tuple[int, ...], into: Array) -> None:
        """Read the piece of an array that begins at `offset` into contiguous memory of its shape and its dtype."""
