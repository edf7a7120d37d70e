"""Views of a source: some of its rows, its rows transformed, or a row of one of its parts.

A view exposes the source's metadata: its files, blocks and lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.task import Source


class View:
    """A source that passes on what another one knows of its files.

    Args:
        source: the underlying source.
    """

    def __init__(self, source: Any) -> None:
        self.source = source

    @property
    def remote(self) -> bool:
        """Whether rows are read from a URL."""
        return bool(getattr(self.source, "remote", False))

    @property
    def manifest(self) -> Any:
        """The manifest of the source's files, a dict; None if it has none."""
        return getattr(self.source, "manifest", None)

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if files have changed since they were opened; see `unisono.open_source`."""
        if hasattr(self.source, "check_files"):
            self.source.check_files(share, shares)

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise if the data differ from those of an earlier `manifest`; see `unisono.open_source`."""
        if hasattr(self.source, "check_same"):
            self.source.check_same(before)

    def keep_blocks(self, count: int) -> None:
        """Keep up to `count` blocks of the source in memory; see `unisono.open_source`."""
        if hasattr(self.source, "keep_blocks"):
            self.source.keep_blocks(count)

    def _fingerprint(self, address: Any) -> str | None:
        whole = getattr(self.source, "fingerprint", None)
        return None if whole is None else hashlib.sha256(json.dumps([whole, address]).encode()).hexdigest()[:32]


class Subset(View):
    """Some rows of a source, in a given order, e.g. a split, a filter or a fold.

    Args:
        source: of all rows.
        rows: the selected row numbers, (n,); ascending if blocks are read in order.
    """

    def __init__(self, source: Source, rows: NDArray[np.int64]) -> None:
        super().__init__(source)
        self.rows = np.asarray(rows, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.source[int(self.rows[row])]

    @cached_property
    def fingerprint(self) -> str | None:
        """A hash of the rows, in hex; None if the source has no fingerprint."""
        return self._fingerprint(self.rows.tolist())

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Units of each row, (n,); None if unknown."""
        lengths: NDArray[np.int64] | None = getattr(self.source, "lengths", None)
        return None if lengths is None else lengths[self.rows]

    @cached_property
    def blocks(self) -> NDArray[np.int64] | None:
        """Rows per block of the source, (blocks,), without empty blocks; None if the source has no blocks."""
        blocks = getattr(self.source, "blocks", None)
        if blocks is None:
            return None
        counts = np.bincount(np.searchsorted(np.cumsum(blocks), self.rows, side="right"))
        return counts[counts > 0]


class Mapped(View):
    """The rows of a source, each transformed by a function.

    Args:
        source: of the rows.
        change: transforms a row; must be picklable if samples are built by worker processes.
        address: everything that determines what `change` returns, as JSON; part of the fingerprint.
    """

    def __init__(self, source: Source, change: Callable[[Any], Any], address: Any) -> None:
        super().__init__(source)
        self._change, self._address = change, address

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Any:
        return self._change(self.source[row])

    @cached_property
    def fingerprint(self) -> str | None:
        """A hash of the rows, in hex; None if the source has no fingerprint."""
        return self._fingerprint(self._address)

    @property
    def blocks(self) -> NDArray[np.int64] | None:
        """Rows per block of the source, (blocks,); None if it has no blocks."""
        found: NDArray[np.int64] | None = getattr(self.source, "blocks", None)
        return found


def locate_row(ends: NDArray[np.int64], row: int) -> tuple[int, int]:
    """The part that contains a row, and the row's number in that part.

    Args:
        ends: number of rows up to the end of each part, (parts,).
        row: number of the row.

    Raises:
        IndexError: for a row that is not there.

    >>> locate_row(np.array([3, 3, 5]), 4)
    (2, 1)
    """
    rows = int(ends[-1]) if len(ends) else 0
    if not 0 <= row < rows:
        raise IndexError(f"row {row} of {rows}")
    part = int(ends.searchsorted(row, side="right"))
    return part, int(row) - (int(ends[part - 1]) if part else 0)
