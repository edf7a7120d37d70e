"""Prepared rows on disk: Arrow IPC files with one column of lists, and a manifest that is written last.

A folder without `manifest.json` is unfinished. Rows are views of memory maps, found by an index lookup. The manifest's
`content` is a hash that does not depend on the division into shards, so two folders with the same rows in the same
order have the same hash.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unisono.data.prepare.manifest import MANIFEST_FILE, ContentHash, Lengths, Units, read_manifest
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.data.views import locate_row
from unisono.runtime.display.work_progress import show_progress
from unisono.runtime.errors import DataError
from unisono.runtime.files import file_hash
from unisono.runtime.untrusted import safe_paths

_PATIENCE = 2.0  # seconds before progress is shown
_BATCH_UNITS = 1 << 18  # units after which a record batch is full


class Shards:
    """The rows of a finished folder: `shards[row]` is a read-only view of its units, shape (length,).

    Args:
        folder: with a manifest.

    Raises:
        DataError: if the folder is not finished, or a shard is missing, truncated or different from the manifest.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._files: list[File] = []  # as they were when they were opened
        offsets: list[Lengths] = []
        self._values: list[Units] = []
        for entry in self.manifest["shards"]:
            path = folder / entry["file"]
            for begin, values in _open_batches(folder, entry, self.manifest):
                offsets.append(begin)
                self._values.append(values)
            self._files.append(File.from_path(path, "arrow", entry["file"]))
        counts = [len(begin) - 1 for begin in offsets]
        self.blocks: Lengths = np.asarray([count for count in counts if count], dtype=np.int64)
        self._ends: Lengths = np.cumsum(counts, dtype=np.int64)  # rows up to the end of each record batch
        self._offsets = offsets
        if self.manifest["rows"] != sum(counts):
            raise damaged_error(folder / MANIFEST_FILE, f"{sum(counts)} rows instead of {self.manifest['rows']}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def __len__(self) -> int:
        return int(self.manifest["rows"])

    def __getitem__(self, row: int) -> Units:
        """All units of a row, (length,)."""
        values, begin, end = self._place(row)
        return values[begin:end]

    def slice(self, row: int, first: int, last: int) -> Units:
        """Units `first..last-1` of a row, fewer at its end, (length,)."""
        values, begin, end = self._place(row)
        return values[begin + first : min(begin + last, end)]

    def where(self, row: int) -> str:
        """The file that contains a row, and the row's number in it, for messages."""
        shard, inside = locate_row(np.cumsum([entry["rows"] for entry in self.manifest["shards"]]), row)
        return f"{self.folder / self.manifest['shards'][shard]['file']}, row {inside} (from 0)"

    @cached_property
    def lengths(self) -> Lengths:
        """Units per row, (rows,)."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(begin) for begin in self._offsets)])

    @property
    def fingerprint(self) -> str:
        """A hash of the rows and their order, in hex, whatever their division into shards."""
        return str(self.manifest["content"])

    def batches(self) -> Iterator[tuple[Units, Lengths]]:
        """All rows in order, a record batch at a time: units (n,) and lengths (rows,)."""
        for values, begin in zip(self._values, self._offsets, strict=True):
            yield values[begin[0] : begin[-1]], np.diff(begin)

    def verify(self) -> None:
        """Read all shards, and raise if one does not have the hash recorded in the manifest.

        Raises:
            DataError: naming the file.
        """
        shards = self.manifest["shards"]
        with show_progress(f"verifying {self.folder}", len(self), "units", "rows", patience=_PATIENCE) as progress:
            for entry in shards:
                if file_hash(self.folder / entry["file"]) != entry["sha256"]:
                    raise damaged_error(self.folder / entry["file"], "its hash differs from that in the manifest")
                progress(entry["rows"], entry["units"])

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if a shard has changed since it was opened; checks every `shares`-th shard from number `share` on.

        Shards that were rewritten with the same content are fine, and so are deleted ones, since mapped data remain
        valid.

        Raises:
            DataError: naming the first changed shard.
        """
        for number in range(share, len(self._files), shares):
            file = self._files[number]
            with wrap_read_errors(file), suppress(FileNotFoundError):
                now = file.now()
                if now != file and file_hash(Path(file.path)) != self.manifest["shards"][number]["sha256"]:
                    raise file.changed_error(now)
                self._files[number] = now

    def _place(self, row: int) -> tuple[Units, int, int]:
        batch, inside = locate_row(self._ends, row)
        begin = self._offsets[batch]
        return self._values[batch], int(begin[inside]), int(begin[inside + 1])


class ShardWriter:
    """Writes one shard. Its bytes depend only on the rows, not on how they are split into calls of `add`.

    Args:
        path: of the file.
        column: name of its column.
        dtype: of the units: `<u1`, `<u2` or `<u4`.
    """

    def __init__(self, path: Path, column: str, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._kind = pa.large_list(pa.from_numpy_dtype(self._dtype))
        self._schema = pa.schema([pa.field(column, self._kind, nullable=False)])
        self._values: list[Units] = []
        self._lengths: list[Lengths] = []
        self._waiting = 0
        self._content = ContentHash()
        self._units, self._shortest, self._longest = 0, 0, 0
        self._sink = _HashingFile(path)
        self._file = pa.ipc.new_file(self._sink, self._schema)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._sink.close()

    def add(self, values: Units, lengths: Lengths) -> None:
        """Append rows: their concatenated units, (n,), and lengths, (rows,)."""
        values, lengths = np.ascontiguousarray(values, dtype=self._dtype), np.asarray(lengths, dtype=np.int64)
        assert int(lengths.sum()) == len(values)
        if not len(lengths):
            return
        shortest = int(lengths.min())
        self._shortest = min(self._shortest, shortest) if self._content.rows else shortest
        self._longest = max(self._longest, int(lengths.max()))
        self._content.add(values, lengths)
        self._units += len(values)
        self._values.append(values)
        self._lengths.append(lengths)
        self._waiting += len(values)
        if self._waiting >= _BATCH_UNITS:
            self._write_full()

    def close(self) -> dict[str, Any]:
        """Write the remaining rows and sync the file to disk; returns the manifest's entry."""
        self._write_full()
        if self._lengths:
            self._write(np.concatenate(self._values), np.concatenate(self._lengths))
        self._file.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        return {
            "rows": self._content.rows,
            "units": self._units,
            "bytes": self._sink.written,
            "sha256": self._sink.digest.hexdigest(),
            "content": self._content.hex,
            "shortest": self._shortest,
            "longest": self._longest,
            "mean": round(self._units / max(1, self._content.rows), 3),
        }

    def _write_full(self) -> None:
        """Write the record batches that are full, and keep the rest."""
        if not self._lengths:
            return
        values, lengths = np.concatenate(self._values), np.concatenate(self._lengths)
        ends = np.cumsum(lengths)
        row = unit = 0
        while len(values) - unit >= _BATCH_UNITS:
            last = int(np.searchsorted(ends, unit + _BATCH_UNITS)) + 1  # includes the row that fills it
            self._write(values[unit : ends[last - 1]], lengths[row:last])
            row, unit = last, int(ends[last - 1])
        self._values, self._lengths, self._waiting = [values[unit:]], [lengths[row:]], len(values) - unit
        if row == len(lengths):
            self._values, self._lengths = [], []

    def _write(self, values: Units, lengths: Lengths) -> None:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), type=self._kind)
        self._file.write_batch(pa.record_batch([column], schema=self._schema))


class _HashingFile(io.BufferedWriter):
    """A file that hashes what Arrow writes to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()
        self.written = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.digest.update(view)
        self.written += view.nbytes
        return super().write(view)


def damaged_error(path: Path, why: str) -> DataError:
    """The error for a shard that cannot be used."""
    return DataError(
        f"{path} is damaged ({why}); remove this file and prepare the data again, which only recreates what is "
        "missing, or copy the file again from its origin"
    )


def _open_batches(
    folder: Path, entry: Mapping[str, Any], manifest: Mapping[str, Any]
) -> Iterator[tuple[Lengths, Units]]:
    """The offsets and units of each record batch of a shard, as views of the memory map."""
    path = folder / entry["file"]
    if not path.is_file():
        raise DataError(
            f"{path} is listed in the manifest but missing; prepare the data again, which only recreates what is "
            "missing, or copy the file again from its origin"
        )
    if path.stat().st_size != entry["bytes"]:  # checked before mapping: reading past the end would kill the process
        raise damaged_error(path, f"{path.stat().st_size} bytes instead of {entry['bytes']}")
    rows = units = 0
    try:
        with safe_paths.open_inside(folder, entry["file"]) as file:
            reader = pa.ipc.open_file(pa.memory_map(safe_paths.path_of(file)))
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(manifest["column"])
            offsets = np.asarray(column.offsets.to_numpy(zero_copy_only=True))
            values = np.asarray(column.values.to_numpy(zero_copy_only=True))
            if values.dtype != np.dtype(manifest["dtype"]) or (np.diff(offsets) < 0).any() or offsets[-1] > len(values):
                raise ValueError(f"record batch {number} is not a list of {manifest['dtype']}")
            rows, units = rows + len(offsets) - 1, units + int(offsets[-1] - offsets[0])
            yield offsets, values
        if (rows, units) != (entry["rows"], entry["units"]):
            raise ValueError(f"{rows} rows of {units} units instead of {entry['rows']} of {entry['units']}")
    except (OSError, ValueError, KeyError, AttributeError, pa.ArrowException) as error:
        raise damaged_error(path, str(error)) from error
