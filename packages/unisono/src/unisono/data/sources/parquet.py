"""Reads Parquet files. A row group is the smallest readable unit, so reading a row costs a row group unless cached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from unisono.data.sources import tables
from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.data.sources.tables import TableBlock

_BATCH_ROWS = 256  # rows converted at a time in sequential reading
_FREE_TEXT = 256 << 20  # bytes of texts, at most, for which nobody looks at the dictionaries


def _dictionaries(array: Any) -> Iterator[Any]:
    """The dictionaries of texts in a column, at any depth."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        if str(kind.value_type) in ("binary", "large_binary", "large_string", "string"):
            yield array.dictionary
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _dictionaries(array.field(number))
    elif pa.types.is_map(kind):
        yield from _dictionaries(array.keys)
        yield from _dictionaries(array.items)
    elif hasattr(array, "values"):
        yield from _dictionaries(array.values)


class ParquetReader:
    """Reads the row groups of a file, which is opened for every read, so that no handle is kept or shared."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted, self._footer = file, wanted, None
        self._checked: set[int] = set()  # row groups whose size is plausible
        with self._open_file() as parquet:
            self._footer, self.schema = parquet.metadata, parquet.schema_arrow
        wanted.check(file.path, self.schema)
        self._names = list(wanted.columns or self.schema.names)
        footer: Any = self._footer
        file.check_rows(footer.num_rows)
        self.rows = np.array([footer.row_group(i).num_rows for i in range(footer.num_row_groups)], dtype=np.int64)
        for rows in (self.rows.min(initial=0), self.rows.sum()):
            file.check_rows(int(rows))
        self._firsts = np.cumsum([0, *self.rows])
        with wrap_read_errors(file):
            size = int.from_bytes(file.range(file.size - 8, file.size - 4), "little")
            content = file.range(max(0, file.size - 8 - size), file.size)
        self.weight = 4 * size  # an estimate of its size in memory
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self._check_nulls()

    def block(self, number: int) -> TableBlock:
        """A row group."""
        self._check_size(number, int(self.rows[number]))
        with self._open_file() as parquet:
            table = parquet.read_row_group(number, columns=self._names, use_threads=False).select(self._names)
        return TableBlock(table, self._file.path, int(self._firsts[number]), self._wanted, table.nbytes)

    def records(self) -> Iterator[dict[str, Any]]:
        """All rows, in less memory than that of a row group."""
        first = 0
        for number in range(len(self.rows)):
            self._check_size(number, _BATCH_ROWS)
        with self._open_file() as parquet:
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=self._names, use_threads=False):
                yield from TableBlock(batch.select(self._names), self._file.path, first, self._wanted, 0)
                first += batch.num_rows

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The lengths of a column's lists, or the values of an integer column, (rows,)."""
        with self._open_file() as parquet:
            each = [
                tables.column_lengths(chunk)
                for number in range(len(self.rows))
                for chunk in parquet.read_row_group(number, columns=[column], use_threads=False).column(0).chunks
            ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *each])

    @contextmanager
    def _open_file(self, **options: Any) -> Iterator[Any]:
        with (
            wrap_read_errors(self._file),
            self._file.open() as source,
            pq.ParquetFile(source, metadata=self._footer, **{"pre_buffer": True, **options}) as parquet,
        ):
            yield parquet

    def _check_size(self, number: int, rows: int) -> None:
        """Refuse a row group that would take far more memory than the file, by its footer and its dictionaries.

        A dictionary may hold one long text that millions of rows repeat in a few bytes.
        """
        if number in self._checked:
            return
        footer: Any = self._footer
        names, size = tuple(self._names), footer.row_group(number).total_byte_size
        columns = [footer.schema.column(place) for place in range(footer.num_columns)]
        wanted = [column for column in columns if column.path.startswith(names)]
        texts = [column.path for column in wanted if column.physical_type == "BYTE_ARRAY"]
        self._file.check_unpacked(size, f"row group {number}")
        fixed = rows * sum(max(8, column.length) for column in wanted if column.physical_type != "BYTE_ARRAY")
        self._file.check_unpacked(fixed, f"row group {number}")
        if texts and rows * size > _FREE_TEXT:
            longest = self._longest_texts(number, texts)
            self._file.check_unpacked(fixed + rows * sum(longest.values()), f"row group {number}")
        self._checked.add(number)

    def _longest_texts(self, number: int, paths: list[str]) -> dict[str, int]:
        """Bytes of the longest value in the dictionary of each column of a row group that begins with one."""
        with self._open_file(read_dictionary=paths, pre_buffer=False) as parquet:
            read = parquet.iter_batches(batch_size=1, row_groups=[number], columns=paths, use_threads=False)
            batch = next(iter(read), None)
        if batch is None:
            return {}
        found: dict[str, int] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            longest = max((pc.max(pc.binary_length(each)).as_py() or 0 for each in _dictionaries(column)), default=0)
            found |= {path: longest for path in paths if path == name or path.startswith(f"{name}.")}
        return found

    def _check_nulls(self) -> None:
        """Reject nulls in columns that must have none, as far as the footer shows."""
        footer: Any = self._footer
        for steps in self._wanted.without_nulls:
            for number in range(footer.num_row_groups):
                with self._open_file(pre_buffer=False) as parquet:  # raises where `group.column` ends the process
                    next(iter(parquet.iter_batches(batch_size=1, row_groups=[number], use_threads=False)), None)
                group = footer.row_group(number)
                for place in range(group.num_columns):
                    column = group.column(place)
                    known = column.statistics if column.path_in_schema == ".".join(steps) else None
                    if known is not None and known.has_null_count and known.null_count:
                        for _ in self.block(number):  # finds the row, and raises
                            pass
