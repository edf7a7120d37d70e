"""Converts rows of Arrow tables to Python values, with the same result for a single row as for a whole block.

Lists of numbers become NumPy arrays that own their memory, so that a queued row does not keep its block alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unisono.data.sources.column_schema import ColumnRequest, is_list, is_number, unwrap_type
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import DataError, find_duplicates, format_examples

_ROWS_PER_BATCH = 256  # rows converted at a time in sequential reading
_BATCH_BYTES = 16 << 20  # of columns converted at a time; Python's objects take several times as much
_LEAST_BYTES = 8  # of a value
_REPEATING = {  # by number, which is asked of every block
    getattr(pa.lib, f"Type_{name}")
    for name in ("DICTIONARY", "RUN_END_ENCODED", "LIST_VIEW", "LARGE_LIST_VIEW", "STRING_VIEW", "BINARY_VIEW")
}


class TableBlock:
    """Rows of a table, as records.

    Args:
        table: a `pyarrow.Table` or `RecordBatch` of the requested columns.
        path: of its file.
        first: number of its first row in the file.
        wanted: the requested columns and types.
        weight: memory in bytes.
    """

    def __init__(self, table: Any, path: str, first: int, wanted: ColumnRequest, weight: int) -> None:
        self.weight = weight
        if doubles := find_duplicates(table.schema.names):
            raise DataError(f"{path} has columns of the same name: {format_examples(doubles)}; rename them")
        self._columns = {
            name: _single_chunk(column) for name, column in zip(table.schema.names, table.columns, strict=True)
        }
        self._made = {name: _value_converter(column.type) for name, column in self._columns.items()}
        self._rows, self._path, self._first, self._wanted = table.num_rows, path, first, wanted

    def __len__(self) -> int:
        return int(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        record = {name: self._values(name, row, 1)[0] for name in self._columns}
        self._check(row, record)
        return record

    def __iter__(self) -> Iterator[dict[str, Any]]:
        at_once = self._rows_at_once
        for first in range(0, len(self), at_once):
            count = min(at_once, len(self) - first)
            columns = [self._values(name, first, count) for name in self._columns]
            for place, values in enumerate(zip(*columns, strict=True) if columns else [()] * count):
                record = dict(zip(self._columns, values, strict=True))
                self._check(first + place, record)
                yield record

    @cached_property  # a block is read again in every epoch for which it is kept
    def _rows_at_once(self) -> int:
        """As many rows as take little memory, since a few bytes of a file may name one long value again and again."""
        columns, size = self._columns.values(), 0.0
        repeat = any(_repeats(column.type) for column in columns)
        if not repeat and sum(column.get_total_buffer_size() for column in columns) <= _BATCH_BYTES:
            return _ROWS_PER_BATCH  # without asking for the part of the buffers that these rows are, which takes longer
        for column in columns:
            size += _largest_value(column) if _repeats(column.type) else column.nbytes / max(1, len(self))
        return int(max(1, min(_ROWS_PER_BATCH, _BATCH_BYTES // max(1.0, size))))

    def _check(self, row: int, record: dict[str, Any]) -> None:
        if self._wanted.types:
            self._wanted.check_nulls(lambda: f"{self._path}, row {self._first + row} (from 0)", record)

    def _values(self, name: str, first: int, count: int) -> list[Any]:
        column, row = self._columns[name].slice(first, count), self._first + first
        try:
            _check_offsets(column)
            return self._made[name](column)
        except UnicodeDecodeError as error:
            raise self._text_error(name, column, row, error) from error
        except BaseException:  # a number beyond the dictionary, a day beyond Python's years, a time zone of nowhere
            what = f"{self._path}: column '{name}' is damaged at row {row} (from 0) or after it"
            with wrap_native_errors(what, advice="write or copy the file again"):  # here, as it takes time for each row
                raise

    def _text_error(self, name: str, column: Any, first: int, error: UnicodeDecodeError) -> DataError:
        """Name the row whose text is none."""
        for place in range(len(column)):
            try:
                column[place].as_py()
            except UnicodeDecodeError as fault:
                return DataError(f"{self._path}: row {first + place} (from 0) of column '{name}' is not UTF-8: {fault}")
        return DataError(f"{self._path}: column '{name}' is not UTF-8: {error}")


def _value_converter(kind: Any) -> Callable[[Any], list[Any]]:
    """The function that converts columns of this type: lists of numbers to arrays, and all else to Python values."""
    kind = unwrap_type(kind)
    return _to_arrays if is_list(kind) and is_number(unwrap_type(kind.value_type)) else _to_python


def _to_python(column: Any) -> list[Any]:
    return list(column.to_pylist())


def _to_arrays(column: Any) -> list[Any]:
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in _to_arrays(chunk)]
    if isinstance(column, pa.ExtensionArray):
        return _to_arrays(column.storage)
    if isinstance(column, pa.DictionaryArray):
        return _to_arrays(column.dictionary_decode())
    flat = column.flatten()
    if column.null_count or flat.null_count:  # row by row, so that no row depends on its neighbours
        if len(column) == 1:
            return _to_python(column)
        return [_to_arrays(column.slice(row, 1))[0] for row in range(len(column))]
    numbers = flat.to_numpy(zero_copy_only=False)
    if len(column) == 1:
        return [numbers.copy()]
    sizes = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    ends = sizes.cumsum(dtype=np.int64).tolist()
    return [numbers[end - size : end].copy() for end, size in zip(ends, sizes.tolist(), strict=True)]


def _single_chunk(column: Any) -> Any:
    """The only chunk of a column, or the column if it has several."""
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) and column.num_chunks == 1 else column


def _check_offsets(column: Any) -> None:
    """Reject offsets outside of the values and negative dictionary indices, which Arrow follows past its memory."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        for chunk in column.chunks:
            _check_offsets(chunk)
    elif isinstance(column, pa.ExtensionArray):
        _check_offsets(column.storage)
    elif isinstance(column, pa.DictionaryArray):
        ends = pc.min_max(column.indices).as_py()  # Arrow ends the process at unsigned ones of 2^63 and more
        if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(column.dictionary):
            raise pa.ArrowInvalid(f"it has numbers of {ends['min']} to {ends['max']} in a dictionary")
        _check_offsets(column.dictionary)
    elif isinstance(column, pa.StructArray):
        for place in range(kind.num_fields):
            _check_offsets(column.field(place))
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary()).validate(full=True)
    elif is_list(kind) and is_number(kind.value_type):
        column.validate(full=True)
    elif isinstance(column, pa.ListArray | pa.LargeListArray):  # maps are lists of pairs
        offsets = column.offsets.to_numpy()
        if offsets[0] < 0 or offsets[-1] > len(column.values) or (np.diff(offsets) < 0).any():
            raise pa.ArrowInvalid("its lists begin or end outside of their values")
        _check_offsets(column.values.slice(offsets[0], offsets[-1] - offsets[0]))
    elif not is_number(kind):
        column.validate(full=True)


def _repeats(kind: Any) -> bool:
    """Whether many rows of a column of this type may share the same bytes of the file."""
    if isinstance(kind, pa.BaseExtensionType):
        return _repeats(kind.storage_type)
    if kind.id in _REPEATING:
        return True
    return any(_repeats(kind.field(place).type) for place in range(kind.num_fields))


def _largest_value(column: Any) -> int:
    """Bytes of the largest value of a column, at most, by its offsets and without following them."""
    kind = column.type
    if isinstance(column, pa.ChunkedArray):
        return max(map(_largest_value, column.chunks), default=0)
    if isinstance(column, pa.ExtensionArray):
        return _largest_value(column.storage)
    if isinstance(column, pa.DictionaryArray):
        return _largest_value(column.dictionary)
    if isinstance(column, pa.RunEndEncodedArray):
        return _largest_value(column.values)
    if isinstance(column, pa.StructArray):
        return sum(_largest_value(column.field(place)) for place in range(kind.num_fields))
    if isinstance(column, pa.UnionArray):
        return max((_largest_value(column.field(place)) for place in range(kind.num_fields)), default=0)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        sizes = np.frombuffer(column.buffers()[1] or b"", "<i4").reshape(-1, 4)[:, 0]  # each begins with its length
        return max(_LEAST_BYTES, int(sizes[column.offset : column.offset + len(column)].max(initial=0)))
    if isinstance(column, pa.FixedSizeListArray):
        return int(kind.list_size) * _largest_value(column.values)
    if is_list(kind) or pa.types.is_map(kind):
        views = isinstance(column, pa.ListViewArray | pa.LargeListViewArray)
        sizes = column.sizes.to_numpy() if views else np.diff(column.offsets.to_numpy())
        return max(0, int(sizes.max(initial=0))) * _largest_value(column.values)
    if pa.types.is_primitive(kind) or pa.types.is_null(kind) or pa.types.is_fixed_size_binary(kind):
        return max(_LEAST_BYTES, 0 if pa.types.is_null(kind) else kind.bit_width // 8)
    return max(_LEAST_BYTES, pc.max(pc.binary_length(column)).as_py() or 0)


def column_lengths(column: Any) -> Any:
    """The lengths of a column's lists, or the values of an integer column, (rows,) int64; nulls are 0."""
    if is_list(unwrap_type(column.type)):
        _check_offsets(column)
        column = pc.list_value_length(column)
    return np.asarray(pc.fill_null(column, 0).to_numpy(), dtype=np.int64)
