"""Reads CSV and TSV files as a whole, since they are usually small.

A column has integers or floats if all its values can be parsed as such, and text otherwise. Use `expect` if that would
be wrong: `{"id": "text"}` keeps the zeros of "007". An empty value is null, or an empty string if text is expected.
"""

from __future__ import annotations

import csv
import hashlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.sources import tables
from unisono.data.sources.column_schema import ColumnRequest, ColumnType
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.runtime.errors import DataError, find_duplicates, format_examples

_BLOCK_ROWS = 4096
_INFERRED = (pa.int64(), pa.float64())


class DelimitedReader:
    """Reads a file of delimited values."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted = file, wanted
        with wrap_read_errors(file), file.open_plain() as stream:
            content = stream.read()
        types = dict(wanted.types)
        columns = _read_columns(file, content)
        self.schema = pa.schema([])
        if columns:
            table = pa.table(
                {name: _typed_column(file, name, values, types.get(name)) for name, values in columns.items()}
            )
            wanted.check(file.path, table.schema)
            self._table = table.select(wanted.columns) if wanted.columns is not None else table
            self.schema = table.schema
        rows = len(next(iter(columns.values()), []))
        self.rows: NDArray[np.int64] = (
            np.diff([*range(0, rows, _BLOCK_ROWS), rows]) if rows else np.zeros(0, dtype=np.int64)
        )
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.weight = len(content)

    def block(self, number: int) -> tables.TableBlock:
        """A few thousand consecutive rows."""
        first = number * _BLOCK_ROWS
        part = self._table.slice(first, _BLOCK_ROWS)
        return tables.TableBlock(part, self._file.path, first, self._wanted, part.nbytes)

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The values of an integer column, (rows,)."""
        found: NDArray[np.int64] = tables.column_lengths(self._table.column(column))
        return found


def _read_columns(file: File, content: bytes) -> dict[str, list[str]]:
    """The values of each column as strings; empty if there are no rows."""
    delimiter = "," if file.format == "csv" else "\t"
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), delimiter=delimiter, strict=True)
        lines = [(reader.line_num, line) for line in reader if any(line)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file.path} cannot be read as {file.format}: {error}") from error
    if len(lines) < 2:
        return {}
    header = lines[0][1]
    if doubles := find_duplicates(header):
        raise DataError(f"{file.path} has columns of the same name: {format_examples(doubles)}; rename them")
    for number, line in lines[1:]:
        if len(line) != len(header):
            raise DataError(
                f"{file.path}, line {number}: {len(line)} values, but the header has {len(header)} columns; a value "
                "may contain an unquoted separator"
            )
    values = zip(*(line for _, line in lines[1:]), strict=True)
    return {name: list(column) for name, column in zip(header, values, strict=True)}


def _typed_column(file: File, name: str, values: list[str], kind: ColumnType | None) -> Any:
    """A column with the expected type, or else the narrowest type that fits all its values."""
    if kind is not None and kind.word == "text":
        return pa.array([value or None for value in values] if kind.nulls else values, pa.string())
    filled = pa.array([value.strip() or None for value in values], pa.string())
    if kind is not None:
        try:
            return filled.cast(pa.type_for_alias(kind.dtype))
        except (pa.ArrowInvalid, ValueError) as error:
            raise DataError(f"{file.path}: column '{name}' is not {kind}: {error}") from error
    for narrow in _INFERRED if filled.null_count < len(filled) else ():
        try:
            return filled.cast(narrow)
        except pa.ArrowInvalid:
            continue
    return pa.array([value or None for value in values], pa.string())
