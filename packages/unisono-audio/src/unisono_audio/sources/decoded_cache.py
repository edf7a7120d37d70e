"""Decodes recordings once for many epochs: features, or samples at one rate, in memory-mapped arrays on disk.

A cache is a folder with `values.npy` (rows, frames, width) or (rows, samples), `lengths.npy`, `rows.npy` (the source
row of each) and `cache.json`, which records the data and settings. It is computed in chunks and can be interrupted and
resumed; a folder without `cache.json` is unfinished.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from typing_extensions import TypedDict

from unisono.data.sources.storage import create_cache_folder
from unisono.runtime.errors import BadSamplesError, ConfigError, DataError
from unisono.runtime.files import atomic_file, write_whole
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count, Object
from unisono_audio import CENTRE, FIRST, Pipeline, Window
from unisono_audio.sources.journal import RowNumber, chunks, read_journal
from unisono_audio.sources.source import Recordings, hash_rows
from unisono_audio.sources.windowed import WindowedRecordings, cut_windows


def make_cache(
    source: Recordings | WindowedRecordings,
    pipeline: Pipeline,
    folder: Path,
    *,
    windows: Literal["first", "centre", "all"] = "first",
    dtype: Literal["float32", "float16"] = "float32",
    on_error: Literal["stop", "mask"] = "stop",
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda rows, bad: None,
) -> DecodedCache:
    """Apply a pipeline to each recording and cache the results.

    Args:
        source: the recordings, or their windows as `cut_rows` cuts them.
        pipeline: to apply; must have a duration, so that all rows have the same shape.
        folder: to write to.
        windows: which part of each recording; `all` creates a row per window.
        dtype: of the values; float16 takes half the space and rounds features to 3 digits.
        on_error: `mask` skips recordings that cannot be used.
        workers: number of threads.
        progress: called with the numbers of rows and bad rows since the last call.

    Raises:
        DataError: naming a recording that cannot be used, or the folder if it cannot be written.
        ConfigError: if the folder contains something else.
    """
    if None in pipeline.shape:
        raise ConfigError("all rows of a cache must have the same shape; give the pipeline a duration")
    rows = cut_rows(source, pipeline, windows)
    window = CENTRE if windows == "centre" else FIRST
    inputs = {
        "source": rows.fingerprint, "pipeline": pipeline.fingerprint(), "windows": windows, "dtype": dtype,
        "rows": len(rows), "on_error": on_error,
    }  # fmt: skip
    finished = _load_progress(folder, inputs)
    if finished is None:
        return DecodedCache(folder)
    shape = (len(rows), *pipeline.shape)
    with _writing(folder):
        values = _open_array(folder / "values.npy", np.dtype(dtype), shape)
        lengths = _open_array(folder / "lengths.npy", np.dtype(np.int64), (len(rows),))
    missing = [part for part in chunks(len(rows)) if part.start not in finished]
    progress(len(rows) - sum(map(len, missing)), 0)

    def build_chunk(part: range) -> dict[int, str]:
        records = [rows[row] for row in part]
        places: list[Window] = [record.get("window", window) for record in records]
        batch = pipeline([r["audio"] for r in records], places, names=[r["name"] for r in records], on_error="mask")
        if batch.errors and on_error == "stop":
            raise BadSamplesError(
                {row: f"row {records[row]['row']} of the source: {text}" for row, text in batch.errors.items()}
            )
        values[part.start : part.stop] = batch.values
        lengths[part.start : part.stop] = batch.lengths
        return {part[row]: text for row, text in batch.errors.items()}

    with ThreadPoolExecutor(workers) as pool:
        for part, bad in zip(missing, pool.map(build_chunk, missing), strict=True):
            with _writing(folder):  # closed inside: to close writes again what could not be written
                values.flush()
                lengths.flush()
                with (folder / "progress.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"first": part.start, "bad": bad}) + "\n")
            finished[part.start] = bad
            progress(len(part), len(bad))
    left_out = {row: text for bad in finished.values() for row, text in bad.items()}
    numbers = np.array(
        [rows[row]["row"] for row in range(len(rows))] if isinstance(rows, WindowedRecordings) else rows.rows,
        dtype=np.int64,
    )
    with _writing(folder):
        np.save(folder / "rows.npy", numbers)
        write_whole(
            folder / "cache.json",
            json.dumps({**inputs, "left_out": {str(k): v for k, v in sorted(left_out.items())}}, indent=1),
        )
        (folder / "progress.jsonl").unlink(missing_ok=True)
    return DecodedCache(folder)


def cut_rows(
    source: Recordings | WindowedRecordings, pipeline: Pipeline, windows: Literal["first", "centre", "all"]
) -> Recordings | WindowedRecordings:
    """The rows of a cache: with `all`, the windows of the recordings; else the recordings themselves."""
    if windows != "all" or isinstance(source, WindowedRecordings) or pipeline.duration is None:
        return source
    return cut_windows(source, pipeline.duration)


class _Cache(TypedDict):
    source: str
    pipeline: Object
    rows: Count
    left_out: dict[RowNumber, str]


class _Chunk(TypedDict):
    first: Count
    bad: dict[RowNumber, str]


def _read_record(folder: Path, name: str) -> dict[str, Any]:
    try:
        return dict(safe_paths.read_json(folder, name, Object))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name} cannot be read: {error}; remove the folder, and build it again") from error


class DecodedCache:
    """The memory-mapped rows of a finished cache.

    A record is a dict: `values` (a view of the memory map), `length`, and `row`, its number in the source.

    Args:
        folder: of the cache.
        pipeline: if given, the cache must have been built with it.

    Raises:
        DataError: if the folder is not a finished cache, or was built with another pipeline.
    """

    def __init__(self, folder: Path | str, pipeline: Pipeline | None = None) -> None:
        self.folder = Path(folder)
        try:
            self.metadata: dict[str, Any] = safe_paths.read_json(self.folder, "cache.json", _Cache)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder} is not a finished cache: {error}; build it with `unisono data audio-cache`"
            ) from error
        if pipeline is not None and self.metadata["pipeline"] != json.loads(json.dumps(pipeline.fingerprint())):
            other = [
                key for key, value in pipeline.fingerprint().items() if self.metadata["pipeline"].get(key) != value
            ]
            raise DataError(
                f"{folder} was built with a different {', '.join(other)}; rebuild it, or restore these settings"
            )
        left_out = [int(row) for row in self.metadata["left_out"]]
        self.row_numbers = np.setdiff1d(np.arange(self.metadata["rows"]), np.array(left_out, dtype=np.int64))

    @cached_property
    def _arrays(self) -> tuple[Any, Any, Any]:
        names = ("values", "lengths", "rows")
        values, lengths, rows = (safe_paths.load_array(self.folder, f"{name}.npy", mapped=True) for name in names)
        return values, lengths, rows

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_arrays"}

    def __len__(self) -> int:
        return len(self.row_numbers)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The record of a row."""
        if not 0 <= row < len(self.row_numbers):
            raise IndexError(f"row {row} of {len(self.row_numbers)}")
        values, lengths, rows = self._arrays
        place = int(self.row_numbers[row])
        return {"values": values[place], "length": int(lengths[place]), "row": int(rows[place])}

    @property
    def fingerprint(self) -> str:
        """A hash of the data and settings it was built from."""
        return hash_rows(np.frombuffer(json.dumps(self.metadata, sort_keys=True).encode().ljust(8), dtype=np.uint8))

    @property
    def manifest(self) -> dict[str, Any]:
        """The cache as JSON, for `check_same`."""
        return {"fingerprint": self.fingerprint, "files": [{"name": self.folder.name, "rows": len(self)}]}

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise if the cache differs from that of an earlier manifest."""
        if before["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{self.folder} is not the cache that this run started with; restore it, or start a new run"
            )


def _load_progress(folder: Path, inputs: dict[str, Any]) -> dict[int, dict[int, str]] | None:
    """The finished chunks of a cache, with their bad rows; None if the cache is complete."""
    settings_file = folder / "about.json"
    expected = json.loads(json.dumps(inputs))
    if (folder / "cache.json").exists():
        stored = _read_record(folder, "cache.json")
        if {key: stored.get(key) for key in expected} == expected:
            return None
        raise ConfigError(
            f"{folder} contains a cache of other data or settings; choose another folder, or remove this one"
        )
    if settings_file.exists():
        if _read_record(folder, settings_file.name) != expected:
            raise ConfigError(
                f"{folder} contains part of a cache of other data or settings; choose another folder, or remove this "
                "one"
            )
        return {
            entry["first"]: {int(row): text for row, text in entry["bad"].items()}
            for entry in read_journal(folder / "progress.jsonl", _Chunk)
        }
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and is not a cache; choose another folder")
    with _writing(folder):
        create_cache_folder(folder)
        write_whole(settings_file, json.dumps(expected, indent=1))
    return {}


def _open_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Open an array on disk to be filled through memory, with its space reserved: a full disk would kill the process.

    Raises:
        DataError: if there is something else.
        OSError: if it cannot be made.
    """
    if not path.exists():
        with atomic_file(path) as temporary:
            np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
            _reserve_space(temporary)
    try:
        found = np.lib.format.open_memmap(path, mode="r+")
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}; remove the folder, and build it again") from error
    if (found.dtype, found.shape) != (dtype, shape):
        raise DataError(f"{path} is another array than that of this cache; remove the folder, and build it again")
    return found


def _reserve_space(path: Path) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror or error}); free some space, repair the disk or choose "
            "another folder. What is finished in it is kept, and the same command goes on from there"
        ) from error
