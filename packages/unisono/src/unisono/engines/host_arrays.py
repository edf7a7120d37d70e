"""Converts arrays of any framework to NumPy arrays, so that checkpoints depend on no framework.

`bfloat16` and `float8` are those of `ml_dtypes`, which has the same names for them as torch, JAX and safetensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
_ALIGNED = 64  # bytes; suits any dtype and the CPU's widest registers


def to_numpy(data: Any) -> Array:
    """An array as a NumPy array; not copied if it is already in host memory.

    Args:
        data: a NumPy, torch or JAX array, on any device.
    """
    if not _is_tensor(data):
        return np.asarray(data)
    plain = data.detach().cpu().resolve_conj().resolve_neg()
    kind = parse_dtype(dtype_name(data))
    if not is_ml_dtype(kind):
        return plain.numpy()  # type: ignore[no-any-return]
    bits = plain.contiguous().view(getattr(sys.modules["torch"], f"int{8 * kind.itemsize}"))
    return bits.numpy().view(kind)  # type: ignore[no-any-return]


def dtype_name(data: Any) -> str:
    """The name of an array's dtype, e.g. `bfloat16`."""
    return str(data.dtype).removeprefix("torch.")


def parse_dtype(name: str) -> np.dtype[Any]:
    """The dtype with a name, which somebody else may have written.

    Raises:
        TypeError: If none has that name.
        ValueError: If it is not one of numbers, but of records, as NumPy reads `f4,03i4`, of texts, or of objects.
    """
    kind = np.dtype(getattr(ml_dtypes, name, name)) if name.isidentifier() else None
    if kind is None or not (kind.kind in "biufc" or is_ml_dtype(kind)):
        raise ValueError(f"'{name}' is not the name of a dtype of numbers")
    return kind


def is_ml_dtype(kind: np.dtype[Any]) -> bool:
    """Whether a dtype is not NumPy's own but from `ml_dtypes`."""
    return hasattr(ml_dtypes, kind.name)


def can_copy_async(data: Any) -> bool:
    """Whether an array can be copied to the host while its device computes: a torch tensor on an accelerator."""
    return _is_tensor(data) and data.device.type not in ("cpu", "mps")


def nbytes(data: Any) -> int:
    """An array's size in bytes, without reading it."""
    size = int(np.prod(tuple(data.shape), dtype=np.int64))
    return size * parse_dtype(dtype_name(data)).itemsize


def plan_layout(arrays: Sequence[Any]) -> tuple[list[int], int]:
    """The offset of a copy of each array in one block of memory, and the size of the block in bytes."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-nbytes(array) // _ALIGNED) * _ALIGNED
    return places, size


def _is_tensor(data: Any) -> bool:
    """Whether it is torch's. Without torch nothing is, nor while a thread, such as a tracker's, is importing it."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(data, kind)
