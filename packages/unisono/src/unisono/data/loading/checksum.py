"""The size and the checksum of a sample of any type."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np

from unisono.collation import SampleColumns


def byte_size(value: Any) -> int:
    """The approximate size of a sample or a batch in bytes: that of its arrays, and a little for everything else.

    >>> byte_size({"pixels": np.zeros((2, 3), np.float32), "label": 7})
    56
    """
    if (known := getattr(value, "nbytes", None)) is not None:  # of arrays, tensors and Arrow tables
        return int(known)
    if isinstance(value, Mapping):
        return sum(byte_size(part) for part in value.values())
    if isinstance(value, list | tuple):
        plain = not value or isinstance(value[0], int | float)
        return 32 * len(value) if plain else sum(byte_size(part) for part in value)
    return len(value) if isinstance(value, bytes | str) else 32


@lru_cache(4096)
def _array_header(dtype: Any, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{shape}".encode()


def checksum(value: Any, before: int = 0) -> int:
    """A CRC-32 of a sample: arrays, tensors, numbers, strings, and mappings, sequences and objects of them.

    It detects whether a sample has changed. Values of other types count by their type alone.

    Args:
        value: the sample.
        before: the checksum to continue.
    """
    if isinstance(value, np.ndarray):
        return _checksum_array(value, before)
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            before = checksum(value[name], crc32(str(name).encode(errors="surrogatepass"), before))
        return before
    if value is None or isinstance(value, (bool, int, float, complex, str, np.generic)):
        return crc32(_plain_text(value), before)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return crc32(value, before)
    if isinstance(value, list | tuple):
        return _checksum_sequence(value, before)
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return _checksum_tensor(value, before)
    before = crc32(type(value).__qualname__.encode(), before)
    return checksum(vars(value), before) if hasattr(value, "__dict__") else before


def checksums(samples: Sequence[Any]) -> list[int]:
    """The checksum of each sample; of `SampleColumns` without making each of them."""
    if not isinstance(samples, SampleColumns):
        return [checksum(sample) for sample in samples]
    found = [0] * len(samples)
    for name in sorted(samples.fields, key=str):
        text, values = str(name).encode(errors="surrogatepass"), samples.fields[name]
        if isinstance(values, np.ndarray) and values.ndim > 1 and not values.dtype.hasobject:
            text += _array_header(values.dtype, values.shape[1:])
            each = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
            found = [crc32(row.data, crc32(text, before)) for row, before in zip(each, found, strict=True)]
        else:
            texts = _plain_texts(values)
            if texts is None:
                found = [checksum(value, crc32(text, before)) for value, before in zip(values, found, strict=True)]
            else:
                found = [crc32(own, crc32(text, before)) for own, before in zip(texts, found, strict=True)]
    return found


def _plain_texts(values: Any) -> list[bytes] | None:
    """What a checksum reads of each number or string, each distinct one formatted once; None for other values."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
            return None
        bits = values.view(f"u{values.dtype.itemsize}")  # -0.0 is not 0.0, and NaN equals itself
        distinct, places = np.unique(bits, return_inverse=True)
        shown = [_plain_text(value) for value in distinct.view(values.dtype)]
        return [shown[place] for place in places.tolist()]
    if not all(type(value) is str for value in values):
        return None
    shown_strings = {value: _plain_text(value) for value in set(values)}
    return [shown_strings[value] for value in values]


def _plain_text(value: Any) -> bytes:
    return f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")


def _checksum_array(array: np.ndarray[Any, Any], before: int) -> int:
    if array.dtype.hasobject:
        return checksum(array.tolist(), before)
    before = crc32(_array_header(array.dtype, array.shape), before)
    try:
        return crc32(array.data if array.flags.c_contiguous else array.tobytes(), before)
    except (ValueError, TypeError, BufferError):  # e.g. dates do not support the buffer protocol
        return crc32(array.tobytes(), before)


def _checksum_sequence(values: list[Any] | tuple[Any, ...], before: int) -> int:
    if values and isinstance(values[0], int | float):
        try:
            array = np.asarray(values)
        except (ValueError, OverflowError):  # of mixed types, or too large for any dtype
            array = np.asarray(None)
        if array.dtype.kind in "biuf":
            return _checksum_array(array, before)
    before = crc32(f"{len(values)}".encode(), before)
    for part in values:
        before = checksum(part, before)
    return before


def _checksum_tensor(tensor: Any, before: int) -> int:
    torch = sys.modules["torch"]
    before = crc32(_array_header(tensor.dtype, tuple(tensor.shape)), before)
    if tensor.layout != torch.strided or tensor.is_meta:
        return before
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return crc32(flat.view(torch.uint8).numpy(), before) if flat.numel() else before
