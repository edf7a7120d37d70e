"""Converts saved arrays, which checkpoints return as NumPy arrays, to tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.engines import host_arrays
from unisono.engines.host_arrays import Array
from unisono.engines.state import StateReader, check_dtype


def read_tensor(reader: StateReader, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A piece of a saved array as a CPU tensor of its saved dtype."""
    return as_tensor(reader.read(name, offset, shape))


def as_tensor(array: Array) -> Tensor:
    """An array as a CPU tensor that shares its memory."""
    if not array.size:  # NumPy's strides of empty arrays differ from torch's
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    if not host_arrays.is_ml_dtype(array.dtype):
        return torch.from_numpy(array)
    bits = array.view(f"int{8 * array.itemsize}")
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def read_into(reader: StateReader, name: str, offset: tuple[int, ...], into: Tensor) -> None:
    """Read a piece of an array into a tensor of its shape; directly into its memory if possible."""
    check_dtype(name, reader.dtype(name), host_arrays.dtype_name(into))
    plain = into.device.type == "cpu" and into.is_contiguous() and not (into.is_conj() or into.is_neg())
    if plain and host_arrays.dtype_name(into) == reader.dtype(name).name:
        reader.fill(name, offset, host_arrays.to_numpy(into))
    else:
        into.copy_(read_tensor(reader, name, offset, tuple(into.shape)))
