"""The one way in for a sparse matrix of a file: its index is checked in Python before any native code follows it.

scipy checks little of the three arrays of a compressed matrix, and then writes where they say: an index beyond the
columns, or a start beyond the entries, is memory of somebody else (a crash at best, other numbers at worst). A test
bans scipy's constructors, and readers that call them, everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
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


def from_blocks(
    starts: Any,
    columns: Any,
    values: Any,
    shape: tuple[int, int],
    shown: object,
    convert: Callable[[csr_array, int], csr_array],
) -> csr_array:
    """A matrix of integers whose entries are read in blocks of rows: no more than one block is there besides it.

    Args:
        starts: as for `from_compressed`.
        columns: as for `from_compressed`; sliced, as a dataset of HDF5 can be.
        values: as `columns`.
        shape: rows and columns.
        shown: as for `from_compressed`.
        convert: makes integers (int64) of the values of a block of rows, given the number of the first.

    Raises:
        DataError: as of `from_compressed`, and for a matrix that does not fit into memory.
    """
    from scipy.sparse import csr_array

    starts, (rows, width), size = _integers(starts, "indptr", shown), shape, len(columns)
    if len(values) != size:
        raise DataError(f"{shown} has {size} indices for {len(values)} values; it is damaged or forged")
    _check_starts(starts, rows, size, shown)
    index = np.dtype(np.int32 if max(size, width) <= np.iinfo(np.int32).max else np.int64)
    needed, there = size * (8 + index.itemsize), psutil.virtual_memory().available
    if needed > there:
        raise DataError(
            f"{shown} has {size} entries, which need {needed / 1e9:.1f} GB of memory, but {there / 1e9:.1f} GB are "
            "free: leave out rare taxa, e.g. with `qiime feature-table filter-features --p-min-samples 2`"
        )
    kept, found, indices = np.zeros(rows + 1, np.int64), np.empty(size, np.int64), np.empty(size, index)
    first = 0
    while first < rows:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK, side="right")) - 1)
        part = slice(int(starts[first]), int(starts[last]))
        own = starts[first : last + 1] - starts[first]
        block = convert(from_compressed(own, columns[part], values[part], (last - first, width), shown), first)
        kept[first + 1 : last + 1] = kept[first] + block.indptr[1:]
        place = slice(int(kept[first]), int(kept[last]))
        found[place], indices[place] = block.data, block.indices
        first = last
    total = int(kept[-1])
    return csr_array((found[:total], indices[:total], kept.astype(index)), shape=shape)


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


def _check_starts(starts: NDArray[np.int64], rows: int, entries: int, shown: object) -> None:
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
