"""Where the entries of a table are: in memory where they fit, else in a file that all processes of a host map.

The file is in the cache, read-only, and written once, block by block. The kernel reads what is asked for and drops it
again where memory is short, so a table of any size is trained on, at the price of reading from the disk. Rows are the
same bits either way.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from unisono import DataError, compute_once
from unisono.recipe_tools import safe_paths, show_progress
from unisono_microbiome.study.sparse import Blocks, from_mapped, join_blocks

if TYPE_CHECKING:
    from scipy.sparse import csr_array

SHARE = 0.5
"""Of the memory that is available: entries that would take more are mapped from a file."""

_VERSION = 1  # of the files
_PATIENCE = 2.0  # seconds before it is shown how far the writing is


@dataclass(frozen=True)
class Storage:
    """Where the entries of tables are kept.

    Attributes:
        in_memory: as of `data.in_memory`.
        cache: where they are else; None for the user's.
    """

    in_memory: bool | Literal["auto"] = "auto"
    cache: Path | None = None

    def keep(self, blocks: Blocks, find_address: Callable[[], Any]) -> csr_array:
        """The matrix of blocks.

        Args:
            blocks: it.
            find_address: what determines its content, as JSON; only called where it is mapped.

        Raises:
            DataError: where it is to be in memory and does not fit, or the disk has no space for it.
        """
        there = psutil.virtual_memory().available
        if self.in_memory is False or (self.in_memory == "auto" and blocks.bytes > SHARE * there):
            return self._map(blocks, find_address)
        if blocks.bytes > there:
            raise DataError(
                f"{blocks.shown} has {blocks.entries} entries, which need {blocks.bytes / 1e9:.1f} GB of memory, but "
                f"{there / 1e9:.1f} GB are free: set data.in_memory=auto to keep them in a file of the cache, or leave "
                "out rare taxa, e.g. with `qiime feature-table filter-features --p-min-samples 2`"
            )
        return join_blocks(blocks)

    def _map(self, blocks: Blocks, find_address: Callable[[], Any]) -> csr_array:
        address = find_address()

        def write(folder: Path) -> None:
            needed, there = blocks.bytes, shutil.disk_usage(folder).free
            if needed > there:
                raise DataError(
                    f"{blocks.shown} has {blocks.entries} entries, which need {needed / 1e9:.1f} GB in the cache "
                    f"{folder.parent.parent}, but {there / 1e9:.1f} GB are free there: set data.cache or "
                    "$UNISONO_CACHE to a folder on another disk"
                )
            _write(blocks, folder)
            if find_address() != address:
                raise DataError(f"{blocks.shown} changed while it was read; start again once it is written completely")

        def load(folder: Path) -> csr_array:
            starts = safe_paths.load_array(folder, "indptr.npy")
            columns, values = (safe_paths.load_array(folder, name, mapped=True) for name in ("indices.npy", "data.npy"))
            return from_mapped(starts, columns, values, blocks)

        return compute_once("microbiome", ["entries", _VERSION, address], write, load, cache=self.cache)


def _write(blocks: Blocks, folder: Path) -> None:
    """Write the three arrays of a compressed matrix."""
    starts = np.zeros(blocks.shape[0] + 1, blocks.index_type)
    first = 0
    with (
        _ArrayFile(folder / "indices.npy", blocks.index_type) as columns,
        _ArrayFile(folder / "data.npy", np.dtype(np.int64)) as values,
        show_progress(f"writing the entries of {blocks.shown}", blocks.shape[0], "entries", "rows", _PATIENCE) as done,
    ):
        for block in blocks.generate():
            columns.append(block.indices)
            values.append(block.data)
            last = first + block.shape[0]
            starts[first + 1 : last + 1] = starts[first] + block.indptr[1:].astype(blocks.index_type)
            done(last - first, block.nnz)
            first = last
    np.save(folder / "indptr.npy", starts)


class _ArrayFile:
    """An array in NumPy's format whose length is known at the end.

    It is written and not mapped, since a full disk is an error of a write, but kills a process that writes to a map.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._dtype, self._length = dtype, 0
        self._file = path.open("xb")
        self._write_header()
        self._begin = self._file.tell()

    def append(self, part: NDArray[Any]) -> None:
        """Add a part of the array."""
        self._file.write(np.ascontiguousarray(part, dtype=self._dtype).data)
        self._length += len(part)

    def _write_header(self) -> None:
        described = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self._file, {**described, "shape": (self._length,)})

    def __enter__(self) -> _ArrayFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if error is None:
                self._file.seek(0)
                self._write_header()
                assert self._file.tell() == self._begin  # NumPy pads it for a length of any number of digits
