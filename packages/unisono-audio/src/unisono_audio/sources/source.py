"""Recordings and their labels as an indexable source, in any of the usual layouts.

A record is a dict: `audio` (bytes, a path, or a byte range), `name` (its location, for messages), `row` (its number in
the source, counting rows that are left out), and the other columns. Nothing is decoded here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono.data.sources.column_schema import ColumnType, is_bytes, is_text, unwrap_type
from unisono.data.sources.files import open_source
from unisono.data.views import View, locate_row
from unisono.runtime.errors import ConfigError, DataError, nearest
from unisono.runtime.remote import is_remote, remote_options
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count, Object
from unisono_audio.recordings import ByteRange
from unisono_audio.sources import archives, metadata
from unisono_audio.sources.metadata import RecordingTable

log = logging.getLogger(__name__)


def open_recordings(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    audio: str | None = None,
    label: str | None = None,
    columns: Sequence[str] | None = None,
    leave_out: str | PathLike[str] | Iterable[int] | None = None,
    storage: Mapping[str, Any] | None = None,
    key: str = "data.path",
    require_files: bool = True,
) -> Recordings:
    """Open recordings.

    Args:
        paths: one of: Arrow or Parquet files (with a struct of `bytes` and `path`, as `datasets` writes `Audio`, or a
            column of bytes or paths); a CSV, TSV, JSON or JSON Lines file with paths, or its folder; a folder of
            recordings; WebDataset archives (`.tar`).
        audio: the column of recordings; None for `audio`, or in metadata files for `file` and similar names.
        label: a column that must contain integers or nulls.
        columns: other columns to read; None for all.
        leave_out: rows to skip: their numbers, or a file written by `unisono data scan`.
        storage: fsspec options for URLs.
        key: the setting that contains the paths, for errors.
        require_files: refuse a metadata file that names recordings that are not there, unless they are left out; a scan
            lists them.

    Raises:
        DataError: if something cannot be found or used, with file, column and row.
    """
    given = [fspath(path) for path in ([paths] if isinstance(paths, str | PathLike) else paths)]
    if not given:
        raise ConfigError(f"{key} names no recordings")
    table: RecordingTable
    if all(path.endswith(".tar") for path in archives.expand_paths(given)):
        table = archives.Archives(archives.expand_paths(given), storage, key)
    elif len(given) == 1 and (found := metadata.find_metadata(given[0])) is not None:
        table = metadata.MetadataTable(found, audio, key)
    else:
        table = _ColumnTable(given, audio, label, columns, storage, key)
    _check_label(table, label, key)
    recordings = Recordings(table, label, columns, _read_left_out(leave_out, len(table)))
    if require_files and isinstance(table, metadata.MetadataTable):
        table.require_files(recordings.rows.tolist())
    return recordings


class Recordings(View):
    """A source of recordings; see `open_recordings`.

    Attributes:
        table: the underlying table.
        rows: (n,) int64, the numbers of the rows that are not left out.
    """

    def __init__(
        self, table: RecordingTable, label: str | None, columns: Sequence[str] | None, left_out: NDArray[np.int64]
    ) -> None:
        super().__init__(table)
        self.table, self._label = table, label
        self._columns = None if columns is None else {*columns, *([label] if label else [])}
        if unknown := sorted((self._columns or set()) - set(table.columns)):
            raise DataError(f"there is no column '{unknown[0]}', {nearest(unknown[0], table.columns)}")
        self.rows: NDArray[np.int64] = np.setdiff1d(np.arange(len(table), dtype=np.int64), left_out)
        if not len(self.rows):
            raise DataError("leave_out names all rows, so none is left")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """The record of a row."""
        if not 0 <= row < len(self.rows):
            raise IndexError(f"row {row} of {len(self.rows)}")
        number = int(self.rows[row])
        record = self.table.record(number)
        if self._label is not None and record[self._label] is not None:
            record[self._label] = int(record[self._label])
        kept = (
            record
            if self._columns is None
            else {n: v for n, v in record.items() if n in self._columns | {"audio", "name"}}
        )
        return {**kept, "row": number}

    @property
    def columns(self) -> dict[str, str]:
        """The types of all columns except the recordings, as words."""
        return self.table.columns

    def read_columns(self, names: Sequence[str]) -> dict[str, list[Any]]:
        """Read columns without the recordings, e.g. to compute splits and labels.

        Args:
            names: of the columns; for `audio`, values are paths if recordings are files, and None otherwise.

        Raises:
            DataError: for a missing column.
        """
        for name in names:
            if name != "audio" and name not in self.table.columns:
                raise DataError(f"there is no column '{name}', {nearest(name, self.table.columns)}")
        kept, read = set(self.rows.tolist()), self.table.read_columns(list(names))
        rows = [record for number, record in enumerate(read) if number in kept]
        return {name: [row[name] for row in rows] for name in names}

    def class_names(self, column: str) -> list[str] | None:
        """Names of a column's classes, as `datasets` stores them for a ClassLabel; None if there are none."""
        return self.table.class_names(column)

    @property
    def fingerprint(self) -> str:
        """A hash of the data and of the excluded rows."""
        if len(self.rows) == len(self.table):
            return self.table.fingerprint
        return f"{self.table.fingerprint}-{hash_rows(self.rows)}"

    @property
    def manifest(self) -> dict[str, Any]:
        """The files as JSON, for `check_same` when they are reopened."""
        return {**self.table.manifest, "read": self.fingerprint}

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise if the data or the rows differ from those of an earlier `manifest`."""
        self.table.check_same(before)
        if before.get("read") != self.fingerprint:
            raise DataError(
                "the rows changed since the last start: leave_out differs. Change it back, or start a new run"
            )


class _ColumnTable(View, RecordingTable):
    """Arrow and Parquet files with a column of structs, bytes or paths."""

    def __init__(
        self,
        paths: list[str],
        audio: str | None,
        label: str | None,
        columns: Sequence[str] | None,
        storage: Mapping[str, Any] | None,
        key: str,
    ) -> None:
        self._paths, self._storage, self._key = paths, storage, key
        self._where = remote_options(storage)
        _require_columns(paths, key)
        schema = open_source(paths, storage=storage, key=key).schema
        kinds = {field.name: unwrap_type(field.type) for field in schema}
        self._audio = audio or "audio"
        if self._audio not in kinds:
            raise DataError(
                f"{key}: there is no column '{self._audio}' of recordings, {nearest(self._audio, kinds)}; name it "
                "with audio="
            )
        kind = kinds[self._audio]
        parts = {kind.field(i).name: unwrap_type(kind.field(i).type) for i in range(kind.num_fields)}
        if not (is_bytes(kind) or is_text(kind) or {"bytes", "path"}.intersection(parts)):
            raise DataError(
                f"{key}: column '{self._audio}' is {kind}, not recordings: a struct of bytes and path, bytes, or paths"
            )
        wanted = None if columns is None else [self._audio, *dict.fromkeys([*columns, *([label] if label else [])])]
        expect = {label: "int?"} if label else None  # rejects a column of text with a clear error
        super().__init__(open_source(paths, wanted, expect=expect, storage=storage, key=key))
        self.fingerprint = str(self.source.fingerprint)
        self.columns: dict[str, str] = {name: str(kind) for name, kind in kinds.items() if name != self._audio}
        self._ends = np.cumsum([int(shard.rows.sum()) for shard in self.source.shards])

    def __len__(self) -> int:
        return len(self.source)

    def record(self, row: int) -> dict[str, Any]:
        """Columns, `audio` and `name`."""
        record = dict(self.source[row])
        shard, local = locate_row(self._ends, row)
        path = self.source.shards[shard].file.path
        given = record.pop(self._audio)
        inner = given.get("path") if isinstance(given, dict) else None
        held = given.get("bytes") if isinstance(given, dict) else given
        if held is None and inner:
            held = inner if is_remote(inner) or Path(inner).is_absolute() else str(Path(path).parent / inner)
        elif isinstance(held, str) and not is_remote(held) and not Path(held).is_absolute():
            held = str(Path(path).parent / held)
        if isinstance(held, str) and is_remote(held):
            held = ByteRange(held, 0, -1, self._where)
        where = f"{path}, row {local} (from 0)" + (f", {inner}" if inner else "")
        return {**record, "audio": b"" if held is None else held, "name": where}

    def read_columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        audio = {self._audio: None} if "audio" in names else {}
        paths = bool(audio) and is_text(unwrap_type(self.source.schema.field(self._audio).type))
        wanted = [name for name in names if name != "audio"] + [self._audio] * paths
        if not wanted:
            yield from ({"audio": None} for _ in range(len(self)))
            return
        for record in open_source(self._paths, wanted, storage=self._storage, key=self._key):
            yield {**record, **({"audio": record[self._audio] if paths else None} if audio else {})}

    def class_names(self, column: str) -> list[str] | None:
        """Class names from the features that `datasets` writes into the schema's metadata."""
        content = (self.source.schema.metadata or {}).get(b"huggingface")
        try:
            feature = safe_paths.parse_json(content, _Described)["info"]["features"].get(column) if content else None
        except ValueError as error:
            log.debug("the schema does not define the classes of '%s': %r", column, error)
            return None
        while isinstance(feature, list | dict):
            inner = feature[0] if isinstance(feature, list) and feature else feature
            if not isinstance(inner, dict):
                return None
            if isinstance(names := inner.get("names"), list):
                return [str(name) for name in names]
            feature = inner.get("feature")
        return None

    @property
    def remote(self) -> bool:
        if self.source.remote:
            return True
        return isinstance(held := self.record(0)["audio"], ByteRange) and is_remote(held.url)


class _Features(TypedDict):
    features: Object


class _Described(TypedDict):
    info: _Features


class _LeftOut(TypedDict):
    row: NotRequired[Count]


def _require_columns(paths: list[str], key: str) -> None:
    """Refuse a folder without any file that could hold recordings; other files in it would be read as rows."""
    for path in paths:
        if not is_remote(path) and Path(path).is_dir():
            kinds = {file.suffix.lower() for file in Path(path).rglob("*")}
            if not kinds & {".arrow", ".feather", ".parquet", ".jsonl", ".ndjson"}:
                raise DataError(
                    f"{key}: {path} has no recordings: neither audio files, nor metadata.csv (.tsv, .json, .jsonl), "
                    "Arrow, Parquet or .tar archives; choose the folder that they are in"
                )


def hash_rows(rows: NDArray[np.int64]) -> str:
    """A short digest of row numbers."""
    return hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()


def _check_label(table: RecordingTable, label: str | None, key: str) -> None:
    if label is None:
        return
    if label not in table.columns:
        raise DataError(f"{key}: there is no column '{label}' of labels, {nearest(label, table.columns)}")
    kind = table.columns[label]
    if not kind.startswith(("int", "uint", "null")):
        raise DataError(
            f"{key}: column '{label}' is {kind}, not {ColumnType.parse('int64?')}; labels are integers (a ClassLabel) "
            "or null. Map its values to integers when the data is written, or choose another column"
        )


def _read_left_out(leave_out: str | PathLike[str] | Iterable[int] | None, rows: int) -> NDArray[np.int64]:
    if leave_out is None:
        return np.zeros(0, dtype=np.int64)
    if isinstance(leave_out, str | PathLike):
        try:
            with safe_paths.open_text(fspath(leave_out)) as file:
                numbers = [safe_paths.parse_json(line, _LeftOut).get("row") for line in file if line.strip()]
        except FileNotFoundError as error:
            raise DataError(
                f"leave_out: {fspath(leave_out)} does not exist; `unisono data scan PATH out={fspath(leave_out)}` "
                "makes it"
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(
                f"leave_out: {fspath(leave_out)} is not a list that `unisono data scan` wrote: {error}"
            ) from error
        leave_out = [number for number in numbers if number is not None]
    found = np.unique(np.fromiter(leave_out, dtype=np.int64))
    if len(found) and not 0 <= found[0] <= found[-1] < rows:
        raise DataError(
            f"leave_out names row {int(found[-1] if found[-1] >= rows else found[0])}, but there are only {rows} rows"
        )
    return found
