"""Writes prepared rows into a different number of shards: same rows, same order, verified by their content hash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.prepare.manifest import MANIFEST_FILE, Lengths
from unisono.data.prepare.partitions import PLAN_FILE
from unisono.data.prepare.preparation import Made, ProgressCallback, RowBuilder, prepare
from unisono.data.prepare.shards import Shards
from unisono.runtime.errors import DataError
from unisono.runtime.untrusted import safe_paths


def reshard(folder: Path, shards: int, out: Path, progress: ProgressCallback = lambda records, units: None) -> Shards:
    """Copy rows, in the same order, into another folder with a different number of shards of about equal size.

    Raises:
        DataError: if there are more shards than rows, or the data are unfinished or damaged.
    """
    source = Shards(folder)
    if not 1 <= shards <= len(source):
        raise DataError(f"shards={shards}: {folder} has {len(source)} rows; choose 1 to {len(source)} shards")
    if out.resolve() == folder.resolve():
        raise DataError(f"out={out} is the input folder; choose another one")
    source.verify()
    result = prepare(_Resharding(folder, shards), out, progress=progress)
    assert result is not None and result.fingerprint == source.fingerprint
    return result


class _Resharding:
    """A preparation whose records are the finished rows of a folder, to be written into a number of shards."""

    def __init__(self, folder: Path, shards: int) -> None:
        self._folder, self._shards = folder, shards
        self._source = Shards(folder)
        manifest = self._source.manifest
        self.column, self.dtype, self.inputs = manifest["column"], manifest["dtype"], manifest["of"]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder, self._shards)

    @property
    def records(self) -> int:
        """Number of rows."""
        return len(self._source)

    @property
    def known_inputs(self) -> Mapping[str, Any]:
        """The rows, and the number of shards."""
        return {"content": self._source.fingerprint, "shards": self._shards}

    def bounds(self, shard_mb: float) -> Sequence[int]:
        """Bounds of shards with about equally many units."""
        return bounds_by_units(self._source.lengths, self._shards)

    def begin(self, folder: Path) -> RowBuilder:
        """Copy files that accompany the shards."""
        shards = {entry["file"] for entry in self._source.manifest["shards"]}
        for path in self._folder.iterdir():
            own = (
                path.name in shards | {MANIFEST_FILE, PLAN_FILE}
                or path.suffix == ".writing"
                or path.name.startswith(".")
            )
            if path.is_file() and not own:
                (folder / path.name).unlink(missing_ok=True)  # of an interrupted attempt, or of this one's plan
                safe_paths.copy_inside(self._folder, path.name, folder / path.name)
        return self

    def make(self, first: int, last: int) -> Iterator[Made]:
        """The rows, unchanged."""
        begin = 0
        for values, lengths in self._source.batches():
            low, high = max(first - begin, 0), min(last - begin, len(lengths))
            if low < high:
                ends = np.concatenate([[0], np.cumsum(lengths)])
                left_out = self._source.manifest["left_out"] if begin + low == 0 else 0
                yield Made(values[ends[low] : ends[high]], lengths[low:high], high - low, left_out)
            begin += len(lengths)


def bounds_by_units(lengths: Lengths, shards: int) -> list[int]:
    """Bounds of shards with about equally many units, each with at least one row.

    Args:
        lengths: units per row, (rows,).
        shards: at most as many as rows.
    """
    ends, places = np.cumsum(lengths), np.arange(1, shards)
    wanted = np.searchsorted(ends, places * int(ends[-1]) / shards) + 1
    wanted = np.maximum.accumulate(wanted - places) + places  # ascending, by at least one row …
    wanted = np.clip(wanted, places, len(lengths) - shards + places)  # … up to both ends
    return [0, *wanted.tolist(), len(lengths)]
