"""Rows of Arrow tables as Python values: the same ones for a row by itself and for a whole block.

Lists of numbers are NumPy arrays of their own memory, so that a row in a queue does not keep its block alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unisono.data.sources.expect import Wanted, is_list, is_number, plain
from unisono.errors import DataError


class TableBlock:
    """Rows of a table, as records.

    Args:
        table: a `pyarrow.Table` or `RecordBatch` of the wanted columns.
        path: of its file.
        first: row of the file that is its first.
        wanted: what is asked for.
        weight: bytes of memory that it takes.
    """

    def __init__(self, table: Any, path: str, first: int, wanted: Wanted, weight: int) -> None:
        self.weight = weight
        self._names, self._columns = list(table.schema.names), list(table.columns)
        self._rows, self._path, self._first, self._wanted = table.num_rows, path, first, wanted

    def __len__(self) -> int:
        return int(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return next(self._records(row, 1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._records(0, len(self))

    def _records(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        columns = [self._values(name, first, count) for name, _ in zip(self._names, self._columns, strict=True)]
        for place in range(count):
            record = {name: column[place] for name, column in zip(self._names, columns, strict=True)}
            if self._wanted.types:
                self._wanted.check_nulls(f"{self._path}, row {self._first + first + place} (from 0)", record)
            yield record

    def _values(self, name: str, first: int, count: int) -> list[Any]:
        column = self._columns[self._names.index(name)].slice(first, count)
        try:
            return values(column)
        except UnicodeDecodeError as error:
            for place in range(count):
                try:
                    column[place].as_py()
                except UnicodeDecodeError as fault:
                    row = self._first + first + place
                    raise DataError(
                        f"{self._path}: row {row} (from 0) of column '{name}' is not UTF-8: {fault}"
                    ) from fault
            raise DataError(f"{self._path}: column '{name}' is not UTF-8: {error}") from error


def values(column: Any) -> list[Any]:
    """The values of an array or a chunked array: lists of numbers as arrays, all else as Python has it."""
    kind = plain(column.type)
    if not (is_list(kind) and is_number(kind.value_type)):
        return list(column.to_pylist())
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in values(chunk)]
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if column.null_count:
        return [values(column.slice(row, 1))[0] if column[row].is_valid else None for row in range(len(column))]
    flat = column.flatten()
    if flat.null_count:
        return list(column.to_pylist())
    numbers = flat.to_numpy(zero_copy_only=False)
    ends = np.cumsum(pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64))
    return [numbers[end - size : end].copy() for end, size in zip(ends, np.diff(ends, prepend=0), strict=True)]


def lengths(column: Any) -> Any:
    """Of the lists of a column, or what a column of integers says, (rows,) int64; nulls are 0."""
    if is_list(plain(column.type)):
        column = pc.list_value_length(column)
    return np.asarray(pc.fill_null(column, 0).to_numpy(), dtype=np.int64)
