"""Cuts long rows into windows: documents into sequences of tokens, recordings into segments."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.views import locate_row


class Windows:
    """Rows cut into windows that never cross row boundaries; rows too short for a window are left out.

    Args:
        store: the rows, with `shards`, `lengths` (rows,), `files` (as JSON) and `slice(row, first, last)`.
        chosen: the rows to use, in order.
        size: distance in units between windows of a row; None for one window per row.
        overlap: units that a window has in addition to `size`, shared with the next window.
    """

    def __init__(self, store: Any, chosen: NDArray[np.int64], size: int | None, overlap: int = 0) -> None:
        units = np.maximum(store.lengths[chosen] - overlap, 0)
        self._store, self._size, self._overlap = store, size or int(units.max(initial=1)), overlap
        self._chosen, self._units = chosen[units > 0], units[units > 0]
        self._pieces = -(-self._units // self._size)
        self._last: NDArray[np.int64] = np.cumsum(self._pieces)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Units of each window, without the overlap, (windows,)."""
        lengths = np.full(len(self), self._size, dtype=np.int64)
        lengths[self._last - 1] = (self._units - 1) % self._size + 1
        return lengths

    def __len__(self) -> int:
        return int(self._last[-1]) if len(self._last) else 0

    def __getitem__(self, row: int) -> Any:
        """The window, of up to `size + overlap` units."""
        which, inside = locate_row(self._last, row)
        first = inside * self._size
        return self._store.slice(int(self._chosen[which]), first, first + self._size + self._overlap)

    @cached_property
    def blocks(self) -> NDArray[np.int64]:
        """Windows per record batch of the shards, in order, (blocks,), without empty ones."""
        batch = np.searchsorted(np.cumsum(self._store.shards.blocks), self._chosen, side="right")
        windows = np.bincount(batch, weights=self._pieces).astype(np.int64)
        return windows[windows > 0]

    @property
    def manifest(self) -> dict[str, Any]:
        """The files that the rows come from; see `unisono.open_source`."""
        return {"fingerprint": self._store.shards.fingerprint, "files": self._store.files}

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if shards have changed since they were opened; see `unisono.open_source`."""
        self._store.shards.check_files(share, shares)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the windows, in hex."""
        chosen = hashlib.sha256(self._chosen.astype("<i8").tobytes()).hexdigest()
        # As in runs before `overlap` was configurable.
        cut = self._size if self._overlap == 1 else [self._size, self._overlap]
        facts = [self._store.shards.fingerprint, chosen, cut]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
