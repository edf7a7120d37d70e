"""Which birds are heard when: a table of events, and the classes of a window of a long recording."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, read_table
from unisono.recipe_tools import nearest

_NAMES = {
    "recording": ("recording", "file", "filename", "filepath", "path"),
    "start": ("start", "start_time", "start_s", "begin"),
    "end": ("end", "end_time", "end_s"),
    "label": ("label", "ebird_code", "class"),
}


@dataclass(frozen=True)
class Events:
    """Events by recording.

    Attributes:
        path: of their table, for errors.
        by_recording: of each recording's name, without folders, (events, 3) start, end and class.
    """

    path: Path
    by_recording: dict[str, NDArray[np.float64]]

    def labels(self, recording: str, start: float, duration: float, overlap: float) -> tuple[int, ...]:
        """Classes heard in a window for at least `overlap` seconds, or for as long as they are heard at all."""
        found = self.by_recording.get(name_of(recording))
        if found is None:
            return ()
        heard = np.minimum(found[:, 1], start + duration) - np.maximum(found[:, 0], start)
        enough = heard >= np.minimum(overlap, found[:, 1] - found[:, 0]) - 1e-9
        return tuple(sorted({int(label) for label in found[enough & (heard > 0), 2]}))

    def check_known(self, recordings: Sequence[str]) -> None:
        """Refuse events of recordings that are not there, naming the first."""
        known = {name_of(recording) for recording in recordings}
        for name in self.by_recording:
            if name not in known:
                raise DataError(
                    f"data.events: {self.path} has events of '{name}', which is none of the recordings, "
                    f"{nearest(name, known)}"
                )

    @property
    def classes(self) -> int:
        """One more than the largest class."""
        return 1 + int(max((found[:, 2].max() for found in self.by_recording.values()), default=-1))


def name_of(recording: str) -> str:
    """A recording's file name, which is what tables of events call it by."""
    return PurePosixPath(recording.replace("\\", "/")).name


def read_events(path: Path) -> Events:
    """Read events from a table of text.

    Args:
        path: of a CSV or TSV file with a recording's name, start and end in seconds, and an integer class in each line.

    Raises:
        DataError: for a table without these, naming file, column and line.
    """
    columns = read_table(path, key="data.events")
    chosen = {}
    for what, names in _NAMES.items():
        found = next((name for name in names if name in columns), None)
        if found is None:
            raise DataError(f"data.events: {path} has no column of {what}; call it {' or '.join(names)}")
        chosen[what] = columns[found]
    by_recording: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    rows = zip(chosen["recording"], chosen["start"], chosen["end"], chosen["label"], strict=True)
    for number, (recording, start, end, label) in enumerate(rows):
        try:
            event = float(start), float(end), float(int(label))
        except ValueError as error:
            raise DataError(
                f"data.events: {path}, row {number} (from 0): {error}; start and end are seconds, and classes integers"
            ) from error
        if not 0 <= event[0] < event[1] < np.inf or event[2] < 0:
            raise DataError(
                f"data.events: {path}, row {number} (from 0): from {start} s to {end} s of class {label}; an event "
                "ends after it starts, and its class is not negative"
            )
        by_recording[name_of(recording)].append(event)
    return Events(path, {name: np.array(found) for name, found in by_recording.items()})
