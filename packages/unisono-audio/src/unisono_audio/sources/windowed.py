"""Cuts long recordings into rows of windows, using only their headers; audio before a window is never decoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import unisono_audio as audio
from unisono.data.views import View
from unisono.runtime.errors import DataError
from unisono_audio.sources.source import Recordings, hash_rows


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


class WindowedRecordings(View):
    """Rows of windows: the recording's record, plus `window`.

    Args:
        source: the recordings.
        rows: the source row of each window, (windows,) int64.
        starts: in seconds, (windows,).
    """

    def __init__(self, source: Recordings, rows: Any, starts: Any) -> None:
        super().__init__(source)
        self.rows, self.starts = rows, starts

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The record of a window."""
        return {**self.source[int(self.rows[row])], "window": audio.Window(float(self.starts[row]))}

    @property
    def fingerprint(self) -> str:
        """A hash of the recordings and the windows."""
        return f"{self.source.fingerprint}-{hash_rows(self.rows)}-{hash_rows(self.starts.view(np.int64))}"
