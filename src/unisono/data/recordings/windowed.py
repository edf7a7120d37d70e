"""Cuts long recordings into rows of windows, using only their headers; audio before a window is never decoded."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from unisono import audio
from unisono.data.recordings.source import Recordings
from unisono.runtime.errors import DataError


def cut_windows(source: Recordings, duration: float, hop: float | None = None, threads: int = 8) -> WindowedRecordings:
    """Every window of every recording as a row.

    Args:
        source: the recordings.
        duration: of a window in seconds.
        hop: distance between windows in seconds; None for `duration`.
        threads: number of threads to read headers.

    Raises:
        DataError: naming a recording whose header cannot be read; `unisono data scan` finds them all.
    """

    def count(row: int) -> list[float]:
        record = source[row]
        try:
            header = audio.probe(record["audio"])
        except DataError as error:
            raise DataError(f"row {record['row']} of the source, {record['name']}: {error}") from error
        if header.frames is None:
            raise DataError(f"row {record['row']} of the source, {record['name']}: its header does not give its length")
        return [window.start or 0.0 for window in audio.windows(header.frames, header.rate, duration, hop)]

    with ThreadPoolExecutor(threads) as pool:
        starts = list(pool.map(count, range(len(source))))
    rows = np.repeat(np.arange(len(source), dtype=np.int64), [len(each) for each in starts])
    return WindowedRecordings(source, rows, np.concatenate([np.array(each) for each in starts]))


class WindowedRecordings:
    """Rows of windows: the recording's record, plus `window`.

    Args:
        source: the recordings.
        rows: the source row of each window, (windows,) int64.
        starts: in seconds, (windows,).
    """

    def __init__(self, source: Recordings, rows: Any, starts: Any) -> None:
        self.source, self.rows, self.starts = source, rows, starts

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The record of a window."""
        return {**self.source[int(self.rows[row])], "window": audio.Window(float(self.starts[row]))}

    @property
    def fingerprint(self) -> str:
        """A hash of the recordings and the windows."""
        from unisono.data.recordings.source import hash_rows

        return f"{self.source.fingerprint}-{hash_rows(self.rows)}-{hash_rows(self.starts.view(np.int64))}"

    @property
    def remote(self) -> bool:
        """Whether rows are read from a URL."""
        return self.source.remote

    @property
    def manifest(self) -> dict[str, Any]:
        """The files as JSON."""
        return self.source.manifest

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise if the data differ from those of an earlier manifest."""
        self.source.check_same(before)

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if a file has changed since it was opened."""
        self.source.check_files(share, shares)
