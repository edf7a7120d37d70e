"""Batches on disk, each content once: one that is given to the model too, or read by two ranks, takes its room once.

What a batch is made of beside tensors (dicts, lists, strings) is kept as it is.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

_SHARE = 0.25  # of the room on the disk, which all ranks may take together


class NotKeptError(Exception):
    """A batch that cannot be kept; its text says why, for the report."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is in a store.

    Attributes:
        digest: of its bytes.
        dtype: its name in torch.
        shape: as it was.
        is_array: whether it was an array of NumPy.
    """

    digest: str
    dtype: str
    shape: tuple[int, ...]
    is_array: bool = False


class ContentStore:
    """Tensors by their content.

    Args:
        folder: that all ranks share.
        ranks: how many write into it.
    """

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._left = int(shutil.disk_usage(folder).free * _SHARE / ranks)

    def put(self, batch: Any) -> Any:
        """The batch with every tensor and array replaced by a `StoredTensor`.

        Raises:
            NotKeptError: for what has no plain bytes, classes that are not known, and where the disk has no room.
        """
        return map_leaves(batch, self._put_leaf)

    def get(self, kept: Any) -> Any:
        """The batch as it was given to `put`."""
        return map_leaves(kept, self._get_leaf)

    def _put_leaf(self, value: Any) -> Any:
        is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
        if not (is_array or isinstance(value, Tensor)):
            return value
        with torch._C.DisableTorchFunction():
            plain: Tensor = torch.from_numpy(np.ascontiguousarray(value)) if is_array else value.detach()
            if plain.layout != torch.strided or plain.is_nested or plain.is_meta:
                raise NotKeptError(f"a tensor of layout {plain.layout} cannot be kept")
            data = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digest = xxhash.xxh3_128_hexdigest(data)
        file = self._folder / digest
        if not file.exists():
            self._left -= data.nbytes
            if self._left < 0:
                raise NotKeptError("the rows of these updates take more than a quarter of the room on the disk")
            new = file.with_suffix(f".{os.getpid()}")
            new.write_bytes(data)
            new.replace(file)
        return StoredTensor(digest, str(plain.dtype).removeprefix("torch."), tuple(plain.shape), is_array)

    def _get_leaf(self, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        with torch._C.DisableTorchFunction():
            data = torch.from_numpy(np.fromfile(self._folder / value.digest, np.uint8))
            plain = data.view(getattr(torch, value.dtype)).reshape(value.shape)
            return plain.numpy() if value.is_array else plain


def map_leaves(value: Any, act: Callable[[Any], Any]) -> Any:
    """A batch with `act` applied to whatever is no container; mappings become plain dicts.

    Raises:
        NotKeptError: for an object whose parts are not known.
    """
    if isinstance(value, Mapping):
        return {key: map_leaves(one, act) for key, one in value.items()}
    if is_named_tuple(value):
        return type(value)(*(map_leaves(one, act) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(one, act) for one in value)
    if isinstance(value, StoredTensor | Tensor | np.ndarray | np.generic | str | bytes | int | float | complex | None):
        return act(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: map_leaves(getattr(value, one.name), act) for one in dataclasses.fields(value) if one.init}
        return dataclasses.replace(value, **parts)
    raise NotKeptError(f"a batch holds a {type(value).__qualname__}, of which it is not known what its rows are")


def is_named_tuple(value: Any) -> bool:
    """Whether a value is a tuple with names, which is built otherwise than a tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")
