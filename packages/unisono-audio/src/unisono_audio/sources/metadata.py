"""Reads folders of recordings, with or without a metadata file (CSV, TSV, JSON or JSON Lines)."""

from __future__ import annotations

import csv
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unisono.runtime.errors import DataError, nearest
from unisono.runtime.remote import is_remote
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

_LONGEST = 4096  # limit of a path's length in characters
PATH_COLUMNS = ("file", "file_name", "filename", "path", "audio", "audio_file", "audio_filepath", "audio_path", "wav")
AUDIO_SUFFIXES = (
    ".wav", ".flac", ".ogg", ".oga", ".mp3", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".au", ".caf", ".w64", ".webm",
)  # fmt: skip
_TABLE_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl")


def find_metadata(path: str) -> Path | None:
    """The metadata file at a path, or the folder itself if it has recordings but no metadata; None otherwise."""
    place = Path(path)
    if is_remote(path) or not place.exists():
        return None
    if place.is_file():
        return place if place.suffix.lower() in _TABLE_SUFFIXES else None
    for ending in _TABLE_SUFFIXES:
        if (file := place / f"metadata{ending}").is_file():
            return file
    return place if next(_audio_files(place), None) is not None else None


class RecordingTable(ABC):
    """Rows with a column of recordings.

    Attributes:
        columns: types of the other columns as words (`int64`, `text`, …).
        fingerprint: a hash of the rows.
        changed: what differs if the fingerprint does, for errors.
        files: of the manifest.
        places: paths and URLs that the rows are read from.
    """

    columns: dict[str, str]
    fingerprint: str
    changed: str
    files: list[dict[str, Any]]
    places: Sequence[str]

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def record(self, row: int) -> dict[str, Any]:
        """Columns, `audio` and `name`."""

    @abstractmethod
    def read_columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """These columns of every row, without the recordings."""

    def class_names(self, column: str) -> list[str] | None:
        """Names of a column's classes; None if the data do not define them."""
        return None

    @property
    def remote(self) -> bool:
        """Whether rows are read from a URL."""
        return any(map(is_remote, self.places))

    @property
    def manifest(self) -> dict[str, Any]:
        """The files as JSON."""
        return {"fingerprint": self.fingerprint, "files": self.files}

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise if the data differ from those of an earlier manifest."""
        if before["fingerprint"] != self.fingerprint:
            raise DataError(f"the data changed since the last start: {self.changed}. Restore them, or start a new run")


class MetadataTable(RecordingTable):
    """The rows of a metadata file, or one row per file of a folder, sorted by path.

    Args:
        place: the file or the folder.
        audio: the column of paths, or None.
        key: the setting, for errors.
    """

    def __init__(self, place: Path, audio: str | None, key: str) -> None:
        self._place, self._key = place, key
        folder = place if place.is_dir() else place.parent
        if place.is_dir():
            self._rows = [{"file": path.relative_to(place).as_posix()} for path in sorted(_audio_files(place))]
        else:
            self._rows = _READERS[place.suffix.lower()](place)
        if not self._rows:
            raise DataError(f"{key}: {place} has no rows")
        names = list(self._rows[0])
        self._audio = audio or next((name for name in PATH_COLUMNS if name in names), "")
        if self._audio not in names:
            wanted = f"'{audio}'" if audio else f"of paths ({', '.join(PATH_COLUMNS)})"
            raise DataError(
                f"{key}: {place} has no column {wanted}, {nearest(audio or 'file', names)}; name it by audio="
            )
        self.columns: dict[str, str] = {name: _infer_type(self._rows, name) for name in names if name != self._audio}
        self._paths = [_resolve_path(folder, row, self._audio, place, number) for number, row in enumerate(self._rows)]
        with ThreadPoolExecutor(16) as pool:
            self._status = list(pool.map(file_status, self._paths))
        said = json.dumps([self._rows, [status and status[0] for status in self._status]], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()
        self.changed = f"{place} or the sizes of its recordings differ"
        self.files, self.places = [{"name": place.name, "rows": len(self._rows)}], self._paths

    def __len__(self) -> int:
        return len(self._rows)

    def require_files(self, rows: Iterable[int]) -> None:
        """Raise if the recordings of some of these rows are not there."""
        missing = [row for row in rows if self._status[row] is None]
        if missing:
            raise DataError(
                f"{self._key}: {self._place}, row {missing[0]} (from 0): {self._paths[missing[0]]} does not exist"
                + (f", nor do {len(missing) - 1} others" if len(missing) > 1 else "")
                + f"; correct the paths, remove the rows, or leave out those that `unisono data scan {self._place} "
                "out=bad.jsonl` lists (leave_out)"
            )

    def record(self, row: int) -> dict[str, Any]:
        """Columns, `audio` and `name`."""
        kept = {name: value for name, value in self._rows[row].items() if name != self._audio}
        return {**kept, "audio": self._paths[row], "name": self._paths[row]}

    def read_columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """These columns of every row; `audio` is the path as in the file."""
        return ({**row, "audio": row[self._audio]} for row in self._rows)

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if a recording has changed since it was found; checks every `shares`-th from number `share` on."""
        for row in range(share, len(self._paths), shares):
            now, before = file_status(self._paths[row]), self._status[row]
            if now == before or before is None:
                continue
            what = "is gone" if now is None else f"had {before[0]} bytes and has {now[0]}"
            if now is not None and now[0] == before[0]:
                what = "was rewritten"
            raise DataError(
                f"{self._paths[row]} has changed since it was found: it {what}; restore it, or start a new run"
            )


def _audio_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        inner = path.relative_to(folder)
        if path.suffix.lower() in AUDIO_SUFFIXES and not any(part.startswith(".") for part in inner.parts):
            safe_paths.check_link(folder, inner)
            yield path


def file_status(path: str) -> tuple[int, int] | None:
    """Size and modification time of a local file, or None if it is missing; zeros for a URL."""
    if is_remote(path):
        return 0, 0
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _resolve_path(folder: Path, row: Mapping[str, Any], column: str, place: Path, number: int) -> str:
    name = row[column]
    if not isinstance(name, str) or not name or "\0" in name or len(name) > _LONGEST or not name.isprintable():
        raise DataError(f"{place}, row {number} (from 0): column '{column}' is '{one_line(name)}', not a path")
    return name if is_remote(name) or Path(name).is_absolute() else str(folder / name)


def _read_delimited(place: Path, delimiter: str) -> list[dict[str, Any]]:
    with safe_paths.open_text(place, "utf-8-sig", "") as file:
        try:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            if len(names := reader.fieldnames or []) != len(set(names)):
                raise DataError(f"{place} has two columns '{max(names, key=list(names).count)}'; rename one")
            rows: list[dict[str, Any]] = []
            for number, row in enumerate(reader):
                if None in row or None in row.values():
                    raise DataError(
                        f"{place}, row {number} (from 0): it does not have the {len(reader.fieldnames or [])} columns "
                        "of the header"
                    )
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{place} cannot be read: {error}") from error
    for name in list(rows[0]) if rows else []:  # columns of numbers and empty values become numeric
        for kind in (int, float):
            try:
                if any("_" in row[name] for row in rows):  # Python alone takes `1_000` for a number
                    break
                values = [kind(row[name]) if row[name] != "" else None for row in rows]
                if kind is float and any(_rounds(row[name]) for row in rows):
                    break
            except ValueError:
                continue
            if any(value is not None for value in values):
                for row, value in zip(rows, values, strict=True):
                    row[name] = value
            break
    return rows


def _rounds(text: str) -> bool:
    """Whether it is an integer that another is taken for as a float, as long ids are."""
    return len(text) > 15 and text.strip().lstrip("+-").isdecimal() and int(text) != float(text)


def _read_json(place: Path) -> list[dict[str, Any]]:
    try:
        found = safe_paths.parse_json(safe_paths.read_regular(place), Any)
    except ValueError as error:
        raise DataError(f"{place} is not JSON ({error}); if it was cut off, copy or write it again") from error
    if isinstance(found, dict):  # rows under one of these keys, next to other metadata
        found = next(
            (found[name] for name in ("samples", "data", "rows", "items") if isinstance(found.get(name), list)), None
        )
    return _check_records(place, found)


def _read_json_lines(place: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(safe_paths.read_regular(place).split(b"\n")):  # others may stand in a text
        if line.strip():
            try:
                rows.append(safe_paths.parse_json(line.decode("utf-8-sig"), Any))
            except ValueError as error:
                raise DataError(f"{place}, line {number + 1} cannot be read as JSON: {error}") from error
    return _check_records(place, rows)


def _check_records(place: Path, found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise DataError(
            f"{place} is neither a list of objects nor an object with such a list under 'samples' or 'data'"
        )
    names = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in names} for row in found]


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".csv": lambda place: _read_delimited(place, ","),
    ".tsv": lambda place: _read_delimited(place, "\t"),
    ".json": _read_json,
    ".jsonl": _read_json_lines,
}


def _infer_type(rows: list[dict[str, Any]], name: str) -> str:
    kinds = {type(row[name]) for row in rows} - {type(None)}
    if not kinds:
        return "null"
    if kinds == {int}:
        return "int64"
    if kinds <= {int, float}:
        return "float64"
    return {str: "text", bool: "bool"}.get(kinds.pop(), "struct") if len(kinds) == 1 else "text"
