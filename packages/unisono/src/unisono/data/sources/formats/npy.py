"""Reads NumPy's `.npy` files: a row is an entry of the first axis, or a record of named fields. Never unpickles."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib import format as numpy_format
from numpy.typing import NDArray

from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.storage import MAX_ROW, File, wrap_read_errors
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import DataError
from unisono.runtime.remote import is_remote
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

ARRAY_COLUMN = "array"  # of files without named fields
_BLOCK = 1 << 20  # bytes of rows per block
_HEADER = 1 << 16  # bytes; NumPy refuses longer ones
_MOST_AXES = 32  # of an array, which every version of NumPy has
_MOST_CHARACTER = 0x10FFFF  # of Unicode


@dataclass(frozen=True)
class _Header:
    """The header of a file."""

    shape: tuple[int, ...]  # (rows, ...)
    dtype: np.dtype[Any]
    begin: int  # position of the first element in bytes

    @property
    def row(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def _parse_header(path: str, content: bytes) -> _Header:
    """Parse the header of a file that can be read by rows."""
    begin = io.BytesIO(content)
    with wrap_native_errors(f"{path} cannot be read as npy"):  # NumPy uses Python's parser
        version = numpy_format.read_magic(begin)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"its version is {version[0]}.{version[1]}, and 1.0 to 3.0 are known")
        read = numpy_format.read_array_header_1_0 if version == (1, 0) else numpy_format.read_array_header_2_0
        shape, transposed, dtype = read(begin)
        if version == (3, 0) and dtype.names:  # which is in UTF-8, and read as Latin-1 by the function of 2.0
            dtype.names = tuple(name.encode("latin-1").decode("utf-8") for name in dtype.names)
        if len(shape) + len(dtype.shape) > _MOST_AXES or (dtype.itemsize == 0 and dtype.kind in "US"):
            raise ValueError(f"its shape is {one_line(shape)}, of {dtype}")
        shape, dtype = (*shape, *dtype.shape), dtype.base  # of a `dtype` that is an array itself
    if any(not 0 <= length < 1 << 62 for length in shape):
        raise DataError(f"{path} cannot be read as npy: its header says that its shape is {one_line(shape)}")
    if dtype.hasobject:
        raise DataError(f"{path} contains Python objects, which are never unpickled; save numbers, or use Parquet")
    if not shape or (transposed and len(shape) > 1):
        why = "has no rows" if not shape else "is in Fortran order"
        raise DataError(f"{path} {why}; save it again with numpy.save(path, numpy.ascontiguousarray(array))")
    return _Header(shape, dtype, begin.tell())


def map_array(path: Path) -> NDArray[Any]:
    """Memory-map a local file as a read-only array, without keeping a file handle."""
    with safe_paths.open_regular(path) as file, pa.memory_map(safe_paths.path_of(file)) as source:
        content = source.read_buffer()
    found = _parse_header(str(path), bytes(content[: min(_HEADER, content.size)]))
    return _view_rows(found, content, found.shape[0], found.begin)


def _view_rows(found: _Header, content: Any, rows: int, begin: int = 0) -> NDArray[Any]:
    if rows == 0:
        return np.zeros((0, *found.shape[1:]), found.dtype)
    count = rows * math.prod(found.shape[1:])
    return np.frombuffer(content, found.dtype, count, begin).reshape(rows, *found.shape[1:])


class ArrayBlock:
    """Rows, as records of the requested fields."""

    def __init__(self, rows: NDArray[Any], columns: tuple[str, ...] | None, weight: int) -> None:
        self.weight = weight
        self._rows, self._columns = rows, columns
        _check_characters(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        value = self._rows[row]
        if self._rows.dtype.names:
            return {name: _copy_value(value[name]) for name in self._columns or self._rows.dtype.names}
        return {ARRAY_COLUMN: _copy_value(value)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


def _check_characters(rows: NDArray[Any]) -> None:
    """Refuse texts with characters that do not exist, of which NumPy makes strings that end Python later."""
    for name in rows.dtype.names or ():
        _check_characters(rows[name])
    if rows.dtype.kind == "U" and rows.size:
        codes = np.ascontiguousarray(rows).view(rows.dtype.byteorder + "u4" if rows.dtype.byteorder in "<>" else "u4")
        if (wrong := (codes > _MOST_CHARACTER) | ((codes >= 0xD800) & (codes < 0xE000))).any():
            raise ValueError(f"a text has the character {codes[wrong][0]:#x}, which does not exist")


def _copy_value(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value.item()


class NpyReader:
    """Reads the rows of a file."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted = file, wanted
        with wrap_read_errors(file):
            self._header = found = _parse_header(file.path, file.range(0, min(_HEADER, file.size)))
            file.check_rows(found.shape[0])
            if found.row > MAX_ROW:
                raise DataError(
                    f"{file.path}: a row has {found.row} bytes ({found.shape[1:]} {found.dtype}), more than "
                    f"{MAX_ROW >> 30} GiB; save the array with its samples along the first axis"
                )
            if file.size < found.begin + found.shape[0] * found.row:
                raise DataError(
                    f"{file.path} cannot be read as npy: {file.size} bytes are too few for {found.shape} "
                    f"{found.dtype}: it is truncated; write or copy it again"
                )
            self._content = None if is_remote(file.path) else file.content()
        self.schema = _build_schema(found)
        wanted.check(file.path, self.schema)
        self._per_block = max(1, _BLOCK // max(1, found.row))
        whole, rest = divmod(found.shape[0], self._per_block)
        self.rows = np.array([self._per_block] * whole + [rest] * (rest > 0), dtype=np.int64)
        self.weight = self.rows.nbytes
        self.digest = f"{found.shape} {found.dtype.descr}"

    def block(self, number: int) -> ArrayBlock:
        """Rows of a block."""
        found, count = self._header, int(self.rows[number])
        begin = found.begin + number * self._per_block * found.row
        with wrap_read_errors(self._file):
            if self._content is not None:
                return ArrayBlock(_view_rows(found, self._content, count, begin), self._wanted.columns, 0)
            content = self._file.range(begin, begin + count * found.row)
            return ArrayBlock(_view_rows(found, content, count), self._wanted.columns, len(content))

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The lengths of lists, which are all equal, or the values of an integer column."""
        kind, rows = self.schema.field(column).type, int(self._header.shape[0])
        if pa.types.is_list(kind):
            return np.full(rows, self._header.shape[1], dtype=np.int64)
        blocks = (self.block(number) for number in range(len(self.rows)))
        return np.array([record[column] for block in blocks for record in block], dtype=np.int64)


def _build_schema(found: _Header) -> Any:
    def kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        shape, dtype = (*shape, *dtype.shape), dtype.base
        words = {"U": pa.string(), "S": pa.binary(), "V": pa.binary()}
        arrow = words.get(dtype.kind) or pa.from_numpy_dtype(dtype.newbyteorder("="))
        for _ in shape:
            arrow = pa.list_(arrow)
        return arrow

    if found.dtype.names:
        fields = [(name, kind(found.dtype[name], found.shape[1:])) for name in found.dtype.names]
    else:
        fields = [(ARRAY_COLUMN, kind(found.dtype, found.shape[1:]))]
    return pa.schema(fields)
