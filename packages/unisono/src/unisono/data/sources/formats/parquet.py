"""Reads Parquet files. A row group is the smallest readable unit, so reading a row costs a row group unless cached."""

from __future__ import annotations

import hashlib
import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.formats import tables
from unisono.data.sources.formats.parquet_pages import READ_AHEAD, ColumnPages, read_pages
from unisono.data.sources.formats.tables import TableBlock
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.runtime.errors import DataError
from unisono.runtime.remote import is_remote

_BATCH_ROWS = 256  # rows converted at a time in sequential reading
_AT_ONCE = 1 << 30  # bytes of texts, at most, that are unpacked before they are counted


class _NoBytes(io.RawIOBase):
    """A file that has a size and no content; tells whether it was read."""

    def __init__(self, size: int) -> None:
        self._size, self.was_read = size, False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return offset

    def tell(self) -> int:
        return self._size

    def read(self, size: int = -1, /) -> bytes:
        self.was_read = True
        raise OSError("there is nothing to read")


class _Batches:
    """Consecutive blocks as one."""

    def __init__(self, blocks: Sequence[TableBlock]) -> None:
        self._blocks, self.weight = blocks, sum(block.weight for block in blocks)
        self._ends = np.cumsum([len(block) for block in blocks]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> dict[str, Any]:
        number = bisect_right(self._ends, row)
        return self._blocks[number][row - (self._ends[number - 1] if number else 0)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(self._blocks)


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


class _Leaf(NamedTuple):
    """A column as the file has it, below structures and lists."""

    place: int
    path: str
    is_text: bool
    in_lists: bool
    width: int  # bytes of a value that is not a text, at most


def _count_leaves(kind: Any) -> int:
    """How many leaves a column of this type has in a file."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count_leaves(kind.storage_type)
    return sum(_count_leaves(kind.field(number).type) for number in range(kind.num_fields)) if kind.num_fields else 1


def _find_leaves(parquet: Any) -> dict[str, list[_Leaf]]:
    """The leaves of each column. Their paths do not tell: `a.b` may be a part of `a`, or a column with such a name."""
    places, schema = range(parquet.metadata.num_columns), parquet.schema
    leaves = []
    for place in places:
        column = schema.column(place)
        is_text, in_lists = column.physical_type == "BYTE_ARRAY", column.max_repetition_level > 0
        leaves.append(_Leaf(place, column.path, is_text, in_lists, max(8, column.length)))
    counts = [_count_leaves(field.type) for field in parquet.schema_arrow]
    if sum(counts) != len(leaves):
        raise ValueError(f"it has {len(leaves)} columns of values, where its schema needs {sum(counts)}")
    every, found = iter(leaves), dict[str, list[_Leaf]]()
    for field, count in zip(parquet.schema_arrow, counts, strict=True):
        found.setdefault(field.name, []).extend(islice(every, count))
    return found


class ParquetReader:
    """Reads the row groups of a file, which is opened for every read, so that no handle is kept or shared."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted, self._footer = file, wanted, None
        self._rows_at_once: dict[int, int] = {}  # of the row groups whose size is plausible
        self._footer_checked = False
        with self._open_file() as parquet:
            self._footer, self.schema = parquet.metadata, parquet.schema_arrow
            wanted.check(file.path, self.schema)
            self._leaves = _find_leaves(parquet)
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

    def block(self, number: int) -> TableBlock | _Batches:
        """A row group."""
        first, rows = int(self._firsts[number]), int(self.rows[number])
        with wrap_read_errors(self._file), self._file.open(mapped=False) as source, self._parquet(source) as parquet:
            at_once = self._check_size(number, source=source)
            if rows <= at_once:
                table = parquet.reader.read_row_group(number, self._places(self._names), False).select(self._names)
                self._check_count(table.num_rows, rows, f"row group {number}")
                return TableBlock(table, self._file.path, first, self._wanted, table.nbytes)
            blocks, size = [], 0
            for batch in parquet.reader.iter_batches(at_once, [number], self._places(self._names), False):
                size += batch.nbytes
                self._file.check_unpacked(size, f"row group {number}")
                blocks.append(TableBlock(batch.select(self._names), self._file.path, first, self._wanted, batch.nbytes))
                first += batch.num_rows
        self._check_count(sum(map(len, blocks)), rows, f"row group {number}")
        return _Batches(blocks)

    def records(self) -> Iterator[dict[str, Any]]:
        """All rows, in less memory than that of a row group."""
        first = 0
        rows = min([_BATCH_ROWS, *map(self._check_size, range(len(self.rows)))])
        with self._open_file() as parquet:
            for batch in parquet.reader.iter_batches(rows, range(len(self.rows)), self._places(self._names), False):
                yield from TableBlock(batch.select(self._names), self._file.path, first, self._wanted, 0)
                first += batch.num_rows
        self._check_count(first, int(self._firsts[-1]), "it")

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The lengths of a column's lists, or the values of an integer column, (rows,)."""
        for number in range(len(self.rows)):
            self._check_size(number, column)
        with self._open_file() as parquet:
            each = [
                tables.column_lengths(chunk)
                for number in range(len(self.rows))
                for chunk in parquet.reader.read_row_group(number, self._places([column]), False).column(0).chunks
            ]
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *each])
        self._check_count(len(lengths), int(self._firsts[-1]), f"column '{column}'")
        return lengths

    def _check_count(self, found: int, rows: int, what: str) -> None:
        """Refuse columns that are shorter than the footer says; Arrow reads as many values as there are."""
        if found != rows:
            raise DataError(
                f"{self._file.path}: {what} has {found} rows, but its footer says {rows}; the file is damaged or "
                "forged, so write it again"
            )

    def _places(self, columns: Sequence[str]) -> list[int]:
        """The leaves of some columns, by number.

        Asked for `a` by its name, Arrow reads a column named `a.b` as well; so its inner reader is asked by numbers.
        """
        return [leaf.place for column in columns for leaf in self._leaves[column]]

    @contextmanager
    def _open_file(self, **options: Any) -> Iterator[Any]:
        with (
            wrap_read_errors(self._file),
            self._file.open(mapped=False) as source,
            self._parquet(source, **options) as parquet,
        ):
            yield parquet

    def _parquet(self, source: Any, **options: Any) -> Any:
        # Ahead of a server; a file in memory's reach is read without threads and copies, in a tenth less time.
        ahead = {"pre_buffer": is_remote(self._file.path)}
        return pq.ParquetFile(source, metadata=self._footer, **{**ahead, **options})

    def _check_footer(self) -> None:
        """Let Arrow read what the footer says of every column where its errors can be caught.

        `RowGroupMetaData.column` ends the process where the constructor that it calls throws.
        """
        if self._footer_checked:
            return
        probe, groups = _NoBytes(self._file.size), list(range(len(self.rows)))
        with wrap_read_errors(self._file):
            try:
                with pq.ParquetFile(pa.PythonFile(probe, mode="r"), metadata=self._footer, pre_buffer=True) as parquet:
                    parquet.read_row_groups(groups, use_threads=False)  # which looks at all of them before it reads
            except OSError:
                if not probe.was_read and self.rows.any():
                    raise
        self._footer_checked = True

    def _check_size(self, number: int, column: str | None = None, source: Any = None) -> int:
        """Refuse a row group that would take far more memory than the file.

        A dictionary may hold one long text that millions of rows repeat in a few bytes, and a list may have more values
        than the file has rows. The sizes in a footer bind nobody, so the headers of the pages are asked.

        Args:
            number: Of the row group.
            column: The one that is read; None for all that are wanted.
            source: The file, if it is open.

        Returns:
            As many rows as may be unpacked before their size is known.
        """
        if column is None and number in self._rows_at_once:
            return self._rows_at_once[number]
        footer: Any = self._footer
        rows, what = int(self.rows[number]), f"row group {number}"
        wanted = [leaf for name in (self._names if column is None else [column]) for leaf in self._leaves[name]]
        self._file.check_unpacked(footer.row_group(number).total_byte_size, what)
        places = [leaf.place for leaf in wanted if leaf.is_text or leaf.in_lists]
        if places:
            self._check_footer()
        if source is None and places:
            with wrap_read_errors(self._file), self._file.open(mapped=False) as opened:
                pages = self._read_pages(number, places, opened)
        else:
            pages = self._read_pages(number, places, source)
        fixed, per_row, nested = 0, 0, list[tuple[_Leaf, ColumnPages]]()
        for leaf in wanted:
            found = pages.get(leaf.place)
            if not leaf.is_text:
                fixed += (found.values if found else rows) * leaf.width
            elif found and found.repeated and leaf.in_lists:
                nested.append((leaf, found))
            elif found and found.repeated:
                per_row += found.largest
        self._file.check_unpacked(fixed, what)
        if sum(found.repeated * found.largest for _, found in nested) > _AT_ONCE:
            self._check_nested(number, fixed, nested)
        at_once = max(1, _AT_ONCE // max(1, per_row))
        if column is None:
            self._rows_at_once[number] = at_once
        return at_once

    def _read_pages(self, number: int, places: Sequence[int], source: Any) -> dict[int, ColumnPages]:
        """What the pages of some columns of a row group are, by the columns' numbers; the caller wraps errors."""
        if not places:
            return {}
        footer: Any = self._footer
        group = footer.row_group(number)
        ahead = READ_AHEAD if is_remote(self._file.path) else 0
        found = {place: read_pages(source, group.column(place), ahead) for place in places}
        for place, pages in found.items():
            if pages.late_dictionary:
                raise DataError(
                    f"{self._file.path}: in row group {number}, the dictionary of column "
                    f"'{footer.schema.column(place).path}' "
                    "comes after values, where no writer puts it; the file is damaged or forged, so write it again"
                )
        return found

    def _check_nested(self, number: int, fixed: int, columns: Sequence[tuple[_Leaf, ColumnPages]]) -> None:
        """Refuse lists of texts that would take far more memory than the file, by their dictionaries."""
        size = fixed
        if plain := [leaf for leaf, pages in columns if not pages.delta]:
            longest = self._longest_texts(number, plain)
            size += sum(pages.repeated * longest.get(leaf.place, 0) for leaf, pages in columns if not pages.delta)
        size += sum(pages.repeated * pages.largest for _, pages in columns if pages.delta)
        self._file.check_unpacked(size, f"row group {number}")

    def _longest_texts(self, number: int, leaves: Sequence[_Leaf]) -> dict[int, int]:
        """Bytes of the longest value in the dictionaries of a column, for leaves of it that begin with one."""
        paths, places = [leaf.path for leaf in leaves], [leaf.place for leaf in leaves]
        with self._open_file(read_dictionary=paths, pre_buffer=False) as parquet:
            batch = next(iter(parquet.reader.iter_batches(1, [number], places, False)), None)
        if batch is None:
            return {}
        found: dict[int, int] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            longest = max((pc.max(pc.binary_length(each)).as_py() or 0 for each in _dictionaries(column)), default=0)
            found |= {leaf.place: max(longest, found.get(leaf.place, 0)) for leaf in self._leaves[name]}
        return found

    def _check_nulls(self) -> None:
        """Reject nulls in columns that must have none, as far as the footer shows."""
        footer: Any = self._footer
        if self._wanted.without_nulls:
            self._check_footer()
        for steps in self._wanted.without_nulls:
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                for place in range(group.num_columns):
                    column = group.column(place)
                    known = column.statistics if column.path_in_schema == ".".join(steps) else None
                    if known is not None and known.has_null_count and known.null_count:
                        for _ in self.block(number):  # finds the row, and raises
                            pass
