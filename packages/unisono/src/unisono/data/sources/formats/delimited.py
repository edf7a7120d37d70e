"""Reads CSV and TSV files as a whole, since they are usually small, into a few times their size of memory.

A column has integers or floats if all its values are such numbers in decimal digits, and text otherwise: so do ids that
a float would round, since two of them could become one. Use `expect` if that would be wrong: `{"id": "text"}` keeps the
zeros of "007". An empty value is null, or an empty string if text is expected. Empty rows and columns without a name
at the end of a table are left out, as spreadsheets write them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from unisono.data.sources.column_schema import ColumnRequest, ColumnType
from unisono.data.sources.formats import tables
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.runtime.errors import DataError, find_duplicates, format_examples
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

_BLOCK_ROWS = 4096
_READ_BYTES = 1 << 20
_LINE_ENDS = re.compile(rb"\r\n?|\n")
_INFERRED = (pa.int64(), pa.float64())
_HEXADECIMAL = r"^\s*0[xX]"  # which Arrow takes for an integer
_LONG = r"^\s*[+-]?[0-9]{16,}\s*$"  # an integer that 64 bits of a float may round
_INFINITE = r"(?i)inf"


class DelimitedReader:
    """Reads a file of delimited values."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted = file, wanted
        types = dict(wanted.types)
        digest = hashlib.blake2b(digest_size=16)
        with wrap_read_errors(file), file.open_plain() as stream:
            columns = _read_columns(file, _Digested(stream, digest))
        self.schema, rows = pa.schema([]), sum(map(len, next(iter(columns.values()), ())))
        if rows:
            table = pa.table(
                {name: _typed_column(file, name, values, types.get(name)) for name, values in columns.items()}
            )
            wanted.check(file.path, table.schema)
            self._table = table.select(wanted.columns) if wanted.columns is not None else table
            self.schema = table.schema
        self.rows: NDArray[np.int64] = (
            np.diff([*range(0, rows, _BLOCK_ROWS), rows]) if rows else np.zeros(0, dtype=np.int64)
        )
        self.digest = digest.hexdigest()
        self.weight = self._table.nbytes if rows else 0

    def block(self, number: int) -> tables.TableBlock:
        """A few thousand consecutive rows."""
        first = number * _BLOCK_ROWS
        part = self._table.slice(first, _BLOCK_ROWS)
        return tables.TableBlock(part, self._file.path, first, self._wanted, part.nbytes)

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The values of an integer column, (rows,)."""
        found: NDArray[np.int64] = tables.column_lengths(self._table.column(column))
        return found


class _Digested(io.RawIOBase):
    """A stream whose content is digested as it is read."""

    def __init__(self, stream: Any, digest: Any) -> None:
        self._stream, self._digest = stream, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        self._digest.update(content)
        buffer[: len(content)] = content
        return len(content)


def _read_columns(file: File, stream: io.RawIOBase) -> dict[str, list[Any]]:
    """The values of each column as arrays of texts, some thousand rows in each; without them if there are no rows."""
    text = safe_paths.Text(io.BufferedReader(stream, _READ_BYTES), file.path, "utf-8-sig", "")
    reader = csv.reader(text, delimiter="," if file.format == "csv" else "\t", strict=True)
    chunks: list[list[Any]] = []
    try:
        header = next((line for line in reader if len(line) > 1 or any(line)), [])
        while any(header) and not header[-1].strip():  # as spreadsheets write columns that were emptied
            header = header[:-1]
        if doubles := find_duplicates(header):
            raise DataError(f"{file.path} has columns of the same name: {format_examples(doubles)}; rename them")
        rows = _rows(file, reader, header)
        while part := list(islice(rows, _BLOCK_ROWS)):
            chunks.append([pa.array(values, pa.string()) for values in zip(*part, strict=True)])
    except UnicodeDecodeError as error:
        # The lines before it that were decoded are read; those of the same piece of the file are not.
        number = reader.line_num + 1 + len(_LINE_ENDS.findall(error.object[: error.start]))
        raise DataError(
            f"{file.path}, line {number}: byte {error.object[error.start]:#04x} is not UTF-8 ({error.reason}); save "
            "the file as UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(f"{file.path} cannot be read as {file.format}: {error}") from error
    return {name: [chunk[number] for chunk in chunks] for number, name in enumerate(header)}


def _rows(file: File, reader: Any, header: list[str]) -> Iterator[list[str]]:
    """Rows as wide as the header; of empty values only among others, since spreadsheets write them at the end."""
    empty = 0
    for line in reader:
        if len(line) > len(header) and not any(line[len(header) :]):
            line = line[: len(header)]
        if len(line) <= 1 and not any(line):  # a blank line
            continue
        if len(line) != len(header):
            raise DataError(
                f"{file.path}, line {reader.line_num}: {len(line)} values, but the header has {len(header)} columns; a "
                "value may contain an unquoted separator, or a column may have no name"
            )
        if any(line):
            yield from repeat([""] * len(header), empty)
            yield line
        empty = 0 if any(line) else empty + 1


def _typed_column(file: File, name: str, parts: list[Any], kind: ColumnType | None) -> Any:
    """A column with the expected type, or else the narrowest type that fits all its values; `parts` is emptied."""
    if kind is not None and kind.word == "text":
        return _convert(parts, _null_if_empty if kind.nulls else lambda values: values, pa.string())
    if kind is not None:
        if not kind.dtype:
            raise DataError(f"{file.path}: column '{name}' cannot be {kind}: {file.format} has texts and numbers alone")
        dtype = pa.type_for_alias(kind.dtype)
        try:
            return _convert(parts, lambda values: _cast(values, dtype), dtype)
        except (pa.ArrowInvalid, ValueError) as error:
            raise DataError(f"{file.path}: column '{name}' is not {kind}: {error}") from error
    for narrow in _INFERRED if any(_filled(part).null_count < len(part) for part in parts) else ():
        with suppress(pa.ArrowInvalid):
            for part in parts:
                _cast(part, narrow)
                if narrow == pa.float64() and _rounds(part):
                    raise pa.ArrowInvalid("it would be rounded")
            return _convert(parts, lambda values: _cast(values, narrow), narrow)  # noqa: B023 - not kept
    return _convert(parts, _null_if_empty, pa.string())


def _convert(parts: list[Any], each: Callable[[Any], Any], kind: Any) -> Any:
    """Convert part by part, each let go at once: whole columns of texts and numbers took many times the file."""
    parts.reverse()
    return pa.chunked_array([each(parts.pop()) for _ in range(len(parts))], kind)


def _cast(texts: Any, dtype: Any) -> Any:
    """Texts as numbers; one that is hexadecimal, or becomes infinite, is none.

    Raises:
        pa.ArrowInvalid: Naming the text.
    """
    numbers = _filled(texts).cast(dtype)
    if pa.types.is_integer(dtype):
        wrong = pc.match_substring_regex(texts, _HEXADECIMAL)
    elif pa.types.is_floating(dtype):
        if not pc.any(pc.is_inf(numbers)).as_py():
            return numbers
        wrong = pc.and_(pc.is_inf(numbers), pc.invert(pc.match_substring_regex(texts, _INFINITE)))
    else:
        return numbers
    if pc.any(wrong).as_py():
        what = "hexadecimal" if pa.types.is_integer(dtype) else f"too large for {dtype}"
        raise pa.ArrowInvalid(f"'{one_line(pc.filter(texts, wrong)[0].as_py(), 40)}' is {what}")
    return numbers


def _rounds(texts: Any) -> bool:
    """Whether one of these is an integer that another is taken for as a float."""
    long = pc.filter(texts, pc.match_substring_regex(texts, _LONG))
    return any(int(text.as_py()) != float(text.as_py()) for text in long)


def _filled(values: Any) -> Any:
    return _null_if_empty(pc.utf8_trim_whitespace(values))


def _null_if_empty(values: Any) -> Any:
    return pc.if_else(pc.equal(values, ""), pa.scalar(None, pa.string()), values)
