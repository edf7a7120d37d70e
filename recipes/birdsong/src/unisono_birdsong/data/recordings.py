"""Recordings of birds: BirdSet's Arrow files, saved data sets of Hugging Face, Parquet, and folders with a table.

What splits and labels need is read once, without any sound. Rows of one recording or one recordist are on one side of
the split together, and nothing but their names decides on which.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono_audio as audio
from unisono import DataError, Subset, hold_out
from unisono.recipe_tools import nearest
from unisono_audio.sources import Recordings, cut_windows, open_recordings
from unisono_birdsong.data.events import read_events
from unisono_birdsong.data.labels import Labels, class_names, classes_of, number_classes
from unisono_birdsong.settings import RecordingsData

LABELS = ("ebird_code", "ebird_code_multilabel", "label", "labels")
STARTS, FILES = ("start_time",), ("filepath", "file_path", "original_file")


@dataclass(eq=False)
class LabelledRecordings(Subset):
    """Recordings or windows as records: `audio`, `name`, `row`, `labels`, `known`, `group`, `window`.

    `known` says whether the classes are: a row that is known to have none is one in which no bird is heard.

    Attributes:
        source: of recordings or windows.
        labels: classes of each of its rows; None where they are not known.
        group_names: of each of its rows.
        classes: names of all classes.
        rows: of the source that are in this one.
        starts: (rows of the source,) seconds into its recording where each begins; NaN, or None, where it is whole.
    """

    source: Any
    labels: Sequence[Labels]
    group_names: Sequence[str]
    classes: tuple[str, ...]
    rows: NDArray[np.int64]
    starts: NDArray[np.float64] | None = None

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        """The record of a row."""
        record = super().__getitem__(row)
        place = int(self.rows[row])
        labels = self.labels[place]
        given = {name: record[name] for name in ("audio", "name", "row", "window") if name in record}
        if self.starts is not None and np.isfinite(self.starts[place]):
            given["window"] = audio.Window(float(self.starts[place]))
        return {**given, "labels": labels or (), "known": labels is not None, "group": self.group_names[place]}

    @property
    def groups(self) -> list[str]:
        """Name of each row's group."""
        return [self.group_names[row] for row in self.rows.tolist()]

    @cached_property
    def fingerprint(self) -> str:
        """Of recordings, rows, labels, groups and classes."""
        digest = hashlib.sha256(self.source.fingerprint.encode())
        digest.update(self.rows.tobytes() + (b"" if self.starts is None else self.starts.tobytes()))
        digest.update(json.dumps([list(self.labels), list(self.group_names), self.classes]).encode())
        return digest.hexdigest()


def open_split(config: RecordingsData) -> tuple[LabelledRecordings, LabelledRecordings | None]:
    """The recordings to train on, and those to evaluate on; None where there are none.

    Raises:
        UnisonoError: for recordings, labels or a split that cannot be had, naming key, file, column and row.
    """
    found = _open(config, config.path, config.leave_out, "data.path")
    named = config.group if config.group != "auto" else None
    if config.test is not None:
        other = _open(config, config.test, config.leave_out_test, "data.test")
        classes = _shared_classes(found.classes, other.classes)
        shared = sorted(set(found.groups) & set(other.groups)) if named else []
        if shared:
            others = f" and {len(shared) - 1} others" if len(shared) > 1 else ""
            raise DataError(
                f"data.test has rows of {named} '{shared[0]}'{others} that data.path has as well; leave them out on "
                "one side, or set data.group=null"
            )
        return replace(found, classes=classes), replace(other, classes=classes)
    if not config.held_out and config.held_out_groups is None:
        return found, None
    held_out = hold_out(
        found.groups, config.held_out, config.fold, named=config.held_out_groups, column=named, what="recording"
    )
    return replace(found, rows=found.rows[~held_out]), replace(found, rows=found.rows[held_out])


def _shared_classes(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the classes of both, whose numbers have to mean the same birds."""
    for number, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            raise DataError(
                f"class {number} is '{first}' in data.path and '{second}' in data.test; write both with one list of "
                "classes"
            )
    return max(one, other, key=len)


def _open(config: RecordingsData, path: str | list[str], leave_out: Any, key: str) -> LabelledRecordings:
    source = open_recordings(path, leave_out=leave_out, key=key)
    label = _label_column(config, source, key)
    group, starts = _group_column(config, source), None
    first = [name for name in (label, group) if name is not None]
    columns = source.read_columns(list(dict.fromkeys(["audio", *first, *config.where, *_start_column(source)])))
    if config.where:
        kept = _rows_where(config.where, columns, key)
        source = _some_rows(source, kept)
        columns = {name: [values[row] for row in kept.tolist()] for name, values in columns.items()}
    numbers = source.rows.tolist()
    labels = [classes_of(v, label, n, key) for v, n in zip(columns[label], numbers, strict=True)] if label else None
    names = class_names(config.names, source, label, labels, key)
    groups = _groups(columns, group, source)
    if (column := next(iter(_start_column(source)), None)) is not None and config.window_seconds is None:
        starts = np.array([np.nan if start is None else float(start) for start in columns[column]])
        starts = starts if np.isfinite(starts).any() else None
    labels = labels or [None] * len(source)
    if config.window_seconds is not None:
        return _windows(config, source, labels, groups, names)
    classes = tuple(names or number_classes(labels))
    return LabelledRecordings(source, labels, groups, classes, np.arange(len(source)), starts)


def _windows(
    config: RecordingsData, source: Recordings, labels: Sequence[Labels], groups: Sequence[str], names: list[str] | None
) -> LabelledRecordings:
    """A row of each window; its classes are those of its events, or without a table those of its recording."""
    assert config.window_seconds is not None
    windows = cut_windows(source, config.window_seconds, config.hop_seconds)
    rows = windows.rows.tolist()
    own: list[Labels] = [labels[row] for row in rows]
    if config.events is not None:
        events = read_events(config.events)
        recordings = [str(source[row]["name"]).rpartition(", ")[2] for row in range(len(source))]
        events.check_known(recordings)
        own = [
            events.labels(recordings[row], float(start), config.window_seconds, config.overlap)
            for row, start in zip(rows, windows.starts, strict=True)
        ]
        if names is not None and events.classes > len(names):
            raise DataError(
                f"data.events: {config.events} has class {events.classes - 1}, and there are {len(names)} names"
            )
        if not any(own):
            raise DataError(
                f"data.events: no event of {config.events} is heard for data.overlap={config.overlap:g} s within one "
                f"of the windows of {config.window_seconds:g} s; lower data.overlap, or lengthen data.window_seconds"
            )
        names = names or [f"class {number}" for number in range(events.classes)]
    classes = tuple(names or number_classes(own))
    return LabelledRecordings(windows, own, [groups[row] for row in rows], classes, np.arange(len(windows)))


def _label_column(config: RecordingsData, source: Recordings, key: str) -> str | None:
    if config.label is None or (config.label == "auto" and config.events is not None):
        return None
    if config.label == "auto":
        return next((name for name in LABELS if name in source.columns), None)
    if config.label not in source.columns:
        raise DataError(
            f"{key}: there is no column '{config.label}' of labels (data.label), "
            f"{nearest(config.label, source.columns)}; data.label=null trains without"
        )
    return config.label


def _group_column(config: RecordingsData, source: Recordings) -> str | None:
    if config.group is None:
        return None
    if config.group == "auto":
        return next((name for name in FILES if name in source.columns), "audio")
    if config.group not in source.columns:
        raise DataError(f"data.group={config.group}: there is no such column, {nearest(config.group, source.columns)}")
    return config.group


def _start_column(source: Recordings) -> list[str]:
    return [name for name in STARTS if source.columns.get(name, "").startswith(("int", "float", "double"))]


def _groups(columns: Mapping[str, list[Any]], group: str | None, source: Recordings) -> list[str]:
    """Names of groups; a row that does not say is a group of its own."""
    values = [None] * len(source) if group is None else columns[group]
    return [f"row {row}" if value in (None, "") else str(value) for row, value in zip(source.rows, values, strict=True)]


def _rows_where(where: Mapping[str, str | int], columns: Mapping[str, list[Any]], key: str) -> NDArray[np.int64]:
    """Rows that have all these values; none is refused."""
    kept = np.ones(len(next(iter(columns.values()))), dtype=bool)
    for name, wanted in where.items():
        here = np.array([str(value) == str(wanted) for value in columns[name]])
        if not here.any():
            known = sorted({str(value) for value in columns[name]})
            raise DataError(f"{key}: no row has {name}={wanted} (data.where), {nearest(str(wanted), known)}")
        kept &= here
    if not kept.any():
        raise DataError(f"{key}: no row has all of {dict(where)} (data.where)")
    return np.flatnonzero(kept)


def _some_rows(source: Recordings, kept: NDArray[np.int64]) -> Recordings:
    """Those rows of a source, under their numbers."""
    others = np.setdiff1d(np.arange(len(source.table)), source.rows[kept])
    return Recordings(source.table, None, None, others)
