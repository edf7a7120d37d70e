"""A gradient as a few of its elements: enough to say which sum of which parts it is, and small enough to be kept.

A sum of gradients is the same sum of their elements, whatever elements these are, so predictions hold for a sample as
they do for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_MOST = 1024  # elements of a tensor


def sample_elements(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Elements of every tensor at equal distances, in double precision; the same places for the same shape."""
    return {name: _sample(value) for name, value in tensors.items()}


def add_gradients(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The sum of gradients, of which some may lack some parameters."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.sum([part[name] for part in parts if name in part], axis=0) for name in names}


def norm_of(values: Iterable[Array]) -> float:
    """The norm of all these arrays together, in double precision."""
    flat = (np.asarray(value, np.float64).ravel() for value in values)
    return math.sqrt(sum(float(np.einsum("i,i->", value, value)) for value in flat))  # without an array of squares


def _sample(value: Array) -> Array:
    real = np.stack([value.real, value.imag], axis=-1) if np.iscomplexobj(value) else value
    flat = real.ravel()
    return flat[:: -(-flat.size // _MOST) or 1].astype(np.float64)
