"""Pieces of arrays in safetensors files, and their way back by any other cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unisono.errors import CheckpointError
from unisono.place import Json
from unisono.state import Shard

_AS_PAIRS = (torch.complex128,)  # safetensors has no such dtype; they are written as pairs of real numbers


def write(file: Path, shards: Sequence[Shard]) -> dict[str, Json]:
    """Write pieces into one file; returns what the manifest says of their arrays."""
    described: dict[str, Any] = {}
    contents: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for shard in shards:
        at = ",".join(map(str, shard.offset))
        entry = f"{shard.name}@{at}"
        data = _storable(shard.data.detach()).contiguous()
        storage = data.untyped_storage().data_ptr()
        contents[entry] = data.clone() if storage in storages else data  # safetensors refuses memory that is shared
        storages.add(storage)
        dtype = str(shard.data.dtype).removeprefix("torch.")
        piece = {"file": file.name, "entry": entry, "offset": list(shard.offset), "shape": list(shard.data.shape)}
        described.setdefault(shard.name, {"shape": list(shard.shape), "dtype": dtype, "pieces": []})["pieces"].append(
            piece
        )
    try:
        save_file(contents, file)
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from error
    return described


class ArrayReader:
    """The arrays of a checkpoint, by the piece; see `unisono.state.Reader`.

    Args:
        folder: of the checkpoint.
        arrays: of its manifest.
    """

    def __init__(self, folder: Path, arrays: dict[str, Any]) -> None:
        self._folder, self._arrays = folder, arrays
        self._open: dict[str, Any] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every array."""
        return {name: tuple(array["shape"]) for name, array in self._arrays.items()}

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A piece of an array, put together from the saved pieces that overlap it.

        Raises:
            CheckpointError: if the saved pieces do not cover it.
        """
        dtype = getattr(torch, self._arrays[name]["dtype"])
        result = torch.empty(shape, dtype=dtype)
        values = torch.view_as_real(result) if dtype in _AS_PAIRS else result
        missing = math.prod(shape)
        for piece, first, last in self._overlaps(name, offset, shape):
            there = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, piece["offset"], strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
            view = self._file(piece["file"]).get_slice(piece["entry"])
            part = view[there] if there else self._file(piece["file"]).get_tensor(piece["entry"])
            values[here] = part
            missing -= math.prod(b - a for a, b in zip(first, last, strict=True))
        if missing:
            raise CheckpointError(f"{self._folder}: {missing} elements of '{name}' {shape} at {offset} are in no file")
        return result

    def covers(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether the saved pieces have every element of a piece."""
        found = (
            math.prod(b - a for a, b in zip(first, last, strict=True))
            for _, first, last in self._overlaps(name, offset, shape)
        )
        return sum(found) == math.prod(shape)

    def _overlaps(
        self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[dict[str, Any], list[int], list[int]]]:
        """The saved pieces that overlap a piece, each with the first and the end of what they share."""
        for piece in self._arrays[name]["pieces"]:
            first = [max(a, b) for a, b in zip(offset, piece["offset"], strict=True)]
            last = [
                min(a + n, b + m) for a, n, b, m in zip(offset, shape, piece["offset"], piece["shape"], strict=True)
            ]
            if all(a < b for a, b in zip(first, last, strict=True)):
                yield piece, first, last

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]


def _storable(data: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(data.resolve_conj()) if data.dtype in _AS_PAIRS else data
