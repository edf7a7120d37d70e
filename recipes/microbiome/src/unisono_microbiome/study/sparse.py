"""The one way in for a sparse matrix of a file: its index is checked in Python before any native code follows it.

scipy checks little of the three arrays of a compressed matrix, and then writes where they say: an index beyond the
columns, or a start beyond the entries, is memory of somebody else (a crash at best, other numbers at worst). A test
bans scipy's constructors, and readers that call them, everywhere else. Large matrices are made in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_array


_BLOCK = 1 << 20  # entries that are read at a time


def from_compressed(starts: Any, columns: Any, values: Any, shape: tuple[int, int], shown: object) -> csr_array:
    """A matrix of the three arrays that a compressed format stores, its columns ascending in each row.

    Args:
        starts: (rows + 1,) integers: where each row begins among the entries (`indptr`).
        columns: (entries,) integers: the column of each entry (`indices`).
        values: (entries,) real numbers.
        shape: rows and columns.
        shown: what it is called in messages.

    Raises:
        DataError: if they are not a matrix of that shape, or an entry occurs twice.
    """
    from scipy.sparse import csr_array

    starts, columns, values = (
        _integers(starts, "indptr", shown),
        _integers(columns, "indices", shown),
        _numbers(values, shown),
    )
    rows, width = shape
    if len(columns) != len(values):
        raise DataError(f"{shown} has {len(columns)} indices for {len(values)} values; it is damaged or forged")
    _check_starts(starts, rows, len(columns), shown)
    if len(columns) and not 0 <= (least := int(columns.min())) <= (most := int(columns.max())) < width:
        wrong = least if least < 0 else most
        raise DataError(f"{shown} has the index {wrong}, and {width} columns; it is damaged or forged")
    matrix = csr_array((values, columns, starts), shape=shape)
    matrix.sort_indices()
    same_row = np.ones(max(0, len(columns) - 1), dtype=bool)
    borders = matrix.indptr[1:-1]
    same_row[borders[(borders > 0) & (borders < len(columns))] - 1] = False
    if twice := int((same_row & (matrix.indices[1:] == matrix.indices[:-1])).sum()):
        raise DataError(f"{shown} has {twice} entries in a place that has one already; sum or remove them")
    return matrix


@dataclass(frozen=True)
class Blocks:
    """A matrix of integers that is made block by block, so that it need not fit into memory.

    Attributes:
        shape: rows and columns.
        entries: how many there are at most.
        shown: what it is called in messages.
        generate: begins anew: blocks of consecutive rows (int64), their columns ascending in each row.
    """

    shape: tuple[int, int]
    entries: int
    shown: str
    generate: Callable[[], Iterator[csr_array]]

    @property
    def index_type(self) -> np.dtype[Any]:
        """Of its index, in which scipy needs columns and starts alike."""
        return np.dtype(np.int32 if max(self.entries, self.shape[1]) <= np.iinfo(np.int32).max else np.int64)

    @property
    def bytes(self) -> int:
        """What its entries take."""
        return self.entries * (8 + self.index_type.itemsize)


def split_rows(starts: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Blocks of rows with about a million entries (one row at least): the first of each, and the first of the next."""
    first, rows = 0, len(starts) - 1
    while first < rows:
        end = starts.dtype.type(min(int(starts[first]) + _BLOCK, int(starts[-1])))  # of 32 bits, where they are
        last = max(first + 1, int(np.searchsorted(starts, end, side="right")) - 1)
        yield first, last
        first = last


def read_blocks(
    starts: Any,
    columns: Any,
    values: Any,
    shape: tuple[int, int],
    shown: str,
    convert: Callable[[csr_array, int], csr_array],
) -> Blocks:
    """A matrix of integers whose entries are read in blocks of rows, each checked as by `from_compressed`.

    Args:
        starts: as for `from_compressed`.
        columns: as for `from_compressed`; sliced, as a dataset of HDF5 can be.
        values: as `columns`.
        shape: rows and columns.
        shown: as for `from_compressed`.
        convert: makes integers (int64) of the values of a block of rows, given the number of the first.

    Raises:
        DataError: as of `from_compressed`, for an entry when its block is made.
    """
    starts, size = _integers(starts, "indptr", shown), len(columns)
    if len(values) != size:
        raise DataError(f"{shown} has {size} indices for {len(values)} values; it is damaged or forged")
    _check_starts(starts, shape[0], size, shown)

    def generate() -> Iterator[csr_array]:
        for first, last in split_rows(starts):
            part = slice(int(starts[first]), int(starts[last]))
            own = starts[first : last + 1] - starts[first]
            yield convert(from_compressed(own, columns[part], values[part], (last - first, shape[1]), shown), first)

    return Blocks(shape, size, shown, generate)


def join_blocks(blocks: Blocks) -> csr_array:
    """The whole matrix, in memory; no more than one block is there besides it."""
    from scipy.sparse import csr_array

    index = blocks.index_type
    starts = np.zeros(blocks.shape[0] + 1, np.int64)
    values, columns = np.empty(blocks.entries, np.int64), np.empty(blocks.entries, index)
    first = 0
    for block in blocks.generate():
        last = first + block.shape[0]
        starts[first + 1 : last + 1] = starts[first] + block.indptr[1:]
        place = slice(int(starts[first]), int(starts[last]))
        values[place], columns[place] = block.data, block.indices
        first = last
    total = int(starts[-1])
    return csr_array((values[:total], columns[:total], starts.astype(index)), shape=blocks.shape)


def from_mapped(starts: Any, columns: Any, values: Any, blocks: Blocks) -> csr_array:
    """The matrix of arrays that were written to a file, which are checked block by block and not copied.

    Raises:
        DataError: if they are not sorted counts of that shape.
    """
    from scipy.sparse import csr_array

    (rows, width), shown = blocks.shape, blocks.shown
    if [array.dtype for array in (starts, columns, values)] != [blocks.index_type, blocks.index_type, np.int64]:
        raise DataError(f"{shown} is kept in arrays of another type; they are damaged or forged")
    if len(columns) != len(values):
        raise DataError(f"{shown} is kept as {len(columns)} indices for {len(values)} values; it is damaged or forged")
    _check_starts(starts, rows, len(columns), shown)
    for first, last in split_rows(starts):
        part = slice(int(starts[first]), int(starts[last]))
        own, begins = columns[part], starts[first:last] - starts[first]
        rising = np.diff(own) > 0
        rising[begins[(begins > 0) & (begins < len(own))] - 1] = True
        if len(own) and not (own.min() >= 0 and own.max() < width and rising.all() and values[part].min() > 0):
            raise DataError(f"{shown} is kept as entries that are not sorted counts; they are damaged or forged")
    matrix = csr_array((values, columns, starts), shape=blocks.shape)
    matrix.has_canonical_format = True  # checked, so that scipy need not
    return matrix


def select_blocks(matrix: csr_array, rows: NDArray[np.int64], columns: NDArray[np.int64], shown: str) -> Blocks:
    """Some rows and some columns of a matrix, in these orders."""
    sizes = np.diff(matrix.indptr)[rows]
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    every = np.array_equal(columns, np.arange(matrix.shape[1]))

    def generate() -> Iterator[csr_array]:
        for first, last in split_rows(starts):
            block = matrix[rows[first:last]]
            block = block if every else block[:, columns]
            block.sort_indices()  # which scipy does not promise
            yield block

    return Blocks((len(rows), len(columns)), int(starts[-1]), shown, generate)


def from_entries(rows: Any, columns: Any, values: Any, shape: tuple[int, int], shown: object) -> csr_array:
    """A matrix of the row, column and value of each entry, in any order; as `from_compressed` otherwise."""
    rows, columns = _integers(rows, "rows", shown), _integers(columns, "columns", shown)
    values = _numbers(values, shown)
    if not len(rows) == len(columns) == len(values):
        raise DataError(f"{shown} has entries without a row, a column or a value; it is damaged or forged")
    if len(rows) and not 0 <= (least := int(rows.min())) <= (most := int(rows.max())) < shape[0]:
        wrong = least if least < 0 else most
        raise DataError(f"{shown} has the row {wrong}, and {shape[0]} rows; it is damaged or forged")
    order = np.argsort(rows, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=shape[0]))])
    return from_compressed(starts, columns[order], values[order], shape, shown)


def _check_starts(starts: NDArray[Any], rows: int, entries: int, shown: object) -> None:
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != entries or (starts[1:] < starts[:-1]).any():
        raise DataError(
            f"{shown} has an 'indptr' that does not divide its {entries} entries into {rows} rows (it must rise from 0 "
            f"to {entries} in {rows + 1} steps); it is damaged or forged"
        )


def _integers(array: Any, name: str, shown: object) -> NDArray[np.int64]:
    found = np.asarray(array) if len(array) else np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found.dtype.itemsize == 8 and (found > 2**62).any()):
        raise DataError(f"{shown} has '{name}' that are not a list of integers; it is damaged or forged")
    return found.astype(np.int64)


def _numbers(array: Any, shown: object) -> NDArray[Any]:
    found = np.asarray(array) if len(array) else np.zeros(0)
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise DataError(f"{shown} has values that are not a list of numbers; it is damaged or forged")
    return found
