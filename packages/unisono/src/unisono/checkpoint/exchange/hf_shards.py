"""Safetensors files for others: planned from names and shapes alone, written tensor by tensor, read after a check.

The library's own `save_file` wants all tensors of a file in memory. A header is known before any content is, so here a
file is written in blocks, and what a process holds at a time is one block, however large a file or a tensor is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from typing_extensions import TypedDict

from unisono.checkpoint.core import arrays
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import CheckpointError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

BLOCK = 64 << 20  # bytes that are read, converted and written at a time
CODES = {  # other libraries do not read `fnuz`
    getattr(torch, name): code for name, code in arrays.CODES.items() if not name.endswith("fnuz")
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
LARGEST_INDEX = 256 << 20  # bytes; that of a model with a million tensors is smaller


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its name in it, its dtype and its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """A file to be written, and what it is to hold."""

    name: str
    entries: tuple[TensorEntry, ...]

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(entry.size for entry in self.entries)


def plan_files(entries: Sequence[TensorEntry], limit: float, stem: str = "model") -> list[TensorFile]:
    """Cut tensors, in their order, into files of at most `limit` bytes; a tensor that is larger has one for itself.

    >>> [file.name for file in plan_files([TensorEntry(n, torch.int8, (6,)) for n in "abc"], 12)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    groups: list[list[TensorEntry]] = []
    room = -1.0
    for entry in entries:
        if entry.size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(entry)
        room -= entry.size
    if len(groups) == 1:
        return [TensorFile(f"{stem}.safetensors", tuple(groups[0]))]
    count = len(groups)
    return [TensorFile(f"{stem}-{n:05d}-of-{count:05d}.safetensors", tuple(group)) for n, group in enumerate(groups, 1)]


def index_json(files: Sequence[TensorFile]) -> str:
    """The JSON that says which file has which tensor, as transformers reads it."""
    total = {
        "total_size": sum(file.size for file in files),
        "total_parameters": sum(math.prod(entry.shape) for file in files for entry in file.entries),
    }
    where = {entry.name: file.name for file in files for entry in file.entries}
    return json.dumps({"metadata": total, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"


def write(file: BinaryIO, entries: Iterable[TensorEntry], content: Callable[[TensorEntry], Iterable[Tensor]]) -> None:
    """Write a safetensors file from its beginning.

    Args:
        file: opened for writing.
        entries: what is in it.
        content: the blocks of a tensor in row-major order, in its dtype.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # so that each lies where its dtype wants it
    described = ((entry.name, CODES[entry.dtype], entry.shape, entry.size) for entry in ordered)
    file.write(arrays.encode_header(described, {"format": "pt"}))
    for entry in ordered:
        written = 0
        for block in content(entry):
            assert block.dtype == entry.dtype
            flat = block.detach().contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(flat.numpy()))  # type: ignore[arg-type]
            written += flat.numel()
            del block, flat  # before the next one is read
        assert written == entry.size, f"{entry.name}: {written} bytes of {entry.size}"


def blocks(shape: tuple[int, ...], item: int, limit: int = BLOCK) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an array into pieces that lie one after the other in memory: the offset and the shape of each.

    >>> list(blocks((5, 2), 1, 4))
    [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (1, 2))]
    >>> list(blocks((1, 3), 1, 2))
    [((0, 0), (1, 2)), ((0, 2), (1, 1))]
    """
    row = math.prod(shape[1:]) * item
    if not shape or shape[0] * row <= limit:
        yield (0,) * len(shape), shape
    elif row <= limit:
        rows = max(1, limit // max(1, row))
        for first in range(0, shape[0], rows):
            yield (first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:])
    else:
        for first in range(shape[0]):
            for offset, piece in blocks(shape[1:], item, limit):
                yield (first, *offset), (1, *piece)


class ShardedFiles:
    """The tensors of untrusted safetensors files: one file, or a folder of them with its index if it has one.

    Files named by the index must be in the folder; the library limits headers and checks that offsets are within the
    file and do not overlap.

    Raises:
        CheckpointError: naming a file that is missing, invalid, or wrongly listed in the index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path if path.is_dir() else None
        self._open: dict[str, Any] = {}
        self._file_of_tensor: dict[str, str] = {}
        self.entries: list[TensorEntry] = []
        where, files = None, [path.name]
        if self._folder is not None:
            where, files = self._list_folder(self._folder)
        for file in files:
            opened = self._open_file(file)
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                if name in self._file_of_tensor:
                    raise CheckpointError(
                        f"{path}: {self._file_of_tensor[name]} and {file} both have '{one_line(name)}'"
                    )
                view = opened.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise CheckpointError(
                        f"{path}: '{one_line(name)}' in {file} has dtype {view.get_dtype()}, which torch does not have"
                    )
                self._file_of_tensor[name] = file
                self.entries.append(TensorEntry(name, DTYPES[view.get_dtype()], tuple(view.get_shape())))
        for name, file in (where or {}).items():
            if self._file_of_tensor.get(name) != file:
                raise CheckpointError(f"{path}: the index says that {file} has '{one_line(name)}', but it does not")
        if where is not None and (more := sorted(self._file_of_tensor.keys() - where.keys())):
            raise CheckpointError(
                f"{path}: {self._file_of_tensor[more[0]]} has '{one_line(more[0])}', which the index does not list"
            )

    def content(self, entry: TensorEntry) -> Iterator[Tensor]:
        """A tensor, block by block."""
        opened = self._open_file(self._file_of_tensor[entry.name])
        if not entry.shape:
            yield opened.get_tensor(entry.name)
            return
        view = opened.get_slice(entry.name)
        for offset, shape in blocks(entry.shape, entry.dtype.itemsize):
            # Without elements, an array may have any number of columns, also one that torch cannot count to.
            with wrap_native_errors(f"{self.path}: '{one_line(entry.name)}' cannot be read", CheckpointError):
                block = view[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            yield block

    def _list_folder(self, folder: Path) -> tuple[dict[str, str] | None, list[str]]:
        """The file of every tensor if the folder has an index, and the files."""
        indices = sorted(folder.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise CheckpointError(
                f"{folder} has several indices: {', '.join(path.name for path in indices)}; keep only one"
            )
        if indices:
            where = read_index(folder, indices[0].name)
            return where, sorted(set(where.values()))
        if not (found := sorted(file.name for file in folder.glob("*.safetensors"))):
            raise CheckpointError(f"{folder} has no *.safetensors files")
        return None, found

    def _open_file(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            shown = self.path if self._folder is None else self._folder / file
            with wrap_native_errors(f"{shown} cannot be read as safetensors", CheckpointError):
                opened = safe_paths.open_inside(self.path, file) if self._folder else safe_paths.open_regular(self.path)
                with opened as source:
                    self._open[file] = safe_open(safe_paths.path_of(source), framework="pt")
        return self._open[file]


class _Index(TypedDict):
    weight_map: dict[str, str]


def read_index(folder: Path, name: str) -> dict[str, str]:
    """What an index says: the file of every tensor, each the name of a file of this folder.

    Raises:
        CheckpointError: where it is no index, or names what is no regular file of its folder.
    """
    try:
        where = safe_paths.read_json(folder, name, _Index, LARGEST_INDEX)["weight_map"]
        for file in sorted(set(where.values())):
            safe_paths.open_inside(folder, file).close()
    except (OSError, ValueError) as error:
        if isinstance(error, safe_paths.UnsafePathError):
            raise CheckpointError(str(error)) from error
        if isinstance(error, OSError):
            raise CheckpointError(f"{error.filename} is missing, or cannot be read: {error.strerror}") from error
        raise CheckpointError(
            f"{folder / name} cannot be read as an index of tensors: {one_line(error, 300)}"
        ) from error
    return dict(where)
