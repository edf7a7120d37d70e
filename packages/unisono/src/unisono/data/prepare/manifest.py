"""The manifest of a folder of shards, which is complete if it has one, and a hash of rows whatever their shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from unisono.runtime.errors import DataError
from unisono.runtime.files import write_whole
from unisono.runtime.rng import key
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count, Integer, Number, Object, misfit

FORMAT = 1  # version of the folder's format
MANIFEST_FILE = "manifest.json"
_LARGEST = 1 << 30  # bytes of a JSON file in the folder
_DTYPES = ("<u1", "<u2", "<u4", "<i4")  # of units; signed ones, so that their reader can name file and row
_PRIME = (1 << 127) - 1
_BASE = key("content of a row")

Units = NDArray[Any]  # unsigned integers, (n,)
Lengths = NDArray[np.int64]


class _Shard(TypedDict):
    file: Annotated[str, Field(max_length=255)]  # the usual limit of file systems
    rows: Integer
    units: Integer
    bytes: Integer
    sha256: str


class _Manifest(TypedDict):
    format: Integer
    column: str
    dtype: str
    rows: Integer
    units: Integer
    left_out: Integer
    content: str
    of: dict[str, Any]
    shards: list[_Shard]


class ShardNote(TypedDict):
    """What is written beside a finished shard, until all are."""

    range: list[Count]
    of: Object
    column: str
    dtype: str
    rows: Count
    units: Count
    left_out: Count
    bytes: Count
    sha256: str
    content: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    shortest: Count
    longest: Count
    mean: Number


class Plan(TypedDict):
    """Where the shards of a folder begin and end."""

    format: Integer
    asked: Any
    shard_mb: Number
    bounds: Annotated[list[Count], Field(min_length=2)]


class ContentHash:
    """An order-dependent hash of rows that can be combined from parts: the hashes of rows are the digits of a number.

    `H(a + b) = H(a) · base^rows(b) + H(b)` modulo a prime, so shards can be hashed in parallel.
    """

    def __init__(self) -> None:
        self.rows, self._number = 0, 0

    @classmethod
    def combine(cls, entries: Sequence[Mapping[str, Any]]) -> ContentHash:
        """The hash of concatenated shards, from their manifest entries."""
        whole = cls()
        for entry in entries:
            whole._number = (whole._number * pow(_BASE, entry["rows"], _PRIME) + int(entry["content"], 16)) % _PRIME
            whole.rows += entry["rows"]
        return whole

    def add(self, values: Units, lengths: Lengths) -> None:
        """Add rows: their units, (n,), and lengths, (rows,)."""
        data, size, begin, number = values.data.cast("B"), values.itemsize, 0, self._number
        for end in (np.cumsum(lengths) * size).tolist():
            digit = int.from_bytes(hashlib.blake2b(data[begin:end], digest_size=16).digest(), "little")
            number, begin = (number * _BASE + digit) % _PRIME, end
        self._number = number
        self.rows += len(lengths)

    @property
    def hex(self) -> str:
        """The hash as 32 hexadecimal digits."""
        return f"{self._number:032x}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder.

    Raises:
        DataError: if it is not finished, invalid, or has an unsupported format.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        begun = any(folder.glob("*.json")) if folder.is_dir() else False
        raise DataError(
            f"{folder} is not finished (no {MANIFEST_FILE}). Run the same `unisono data prepare` command again to "
            "create what is missing; if its parts were prepared separately, combine them with `unisono data merge`"
            if begun
            else f"{folder} has no prepared data (no {MANIFEST_FILE}); create it with `unisono data prepare`"
        )
    found = read_json(path, Object)
    if found.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {found.get('format')}, but this version of Unisono reads format {FORMAT}; prepare the "
            "data again"
        )
    if (wrong := misfit(found, _Manifest)) is not None or found["dtype"] not in _DTYPES:
        raise DataError(
            f"{path} is not a manifest of prepared data ({one_line(wrong or 'dtype')}); prepare the data again"
        )
    if any(entry[name] < 0 for entry in found["shards"] for name in ("rows", "units", "bytes")):
        raise DataError(f"{path} is not a manifest of prepared data (a number is below 0); prepare the data again")
    for entry in found["shards"]:
        if not safe_paths.is_inside(folder, entry["file"]) and (folder / entry["file"]).exists():
            raise DataError(
                f"{path} names '{one_line(entry['file'])}', which is not a file in that folder; it was not read"
            )
    return found


def build_manifest(
    column: str, dtype: str, of: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The manifest of these shards.

    Args:
        column: of the shards.
        dtype: of their units.
        of: everything that determines the rows, as JSON.
        entries: the result of `ShardWriter.close` for each shard, plus its `file` and number of records `left_out`.
    """
    rows, units = sum(entry["rows"] for entry in entries), sum(entry["units"] for entry in entries)
    filled = [entry for entry in entries if entry["rows"]]
    return {
        "format": FORMAT,
        "column": column,
        "dtype": dtype,
        "rows": rows,
        "units": units,
        "left_out": sum(entry["left_out"] for entry in entries),
        "shortest": min((entry["shortest"] for entry in filled), default=0),
        "longest": max((entry["longest"] for entry in filled), default=0),
        "mean": round(units / max(1, rows), 3),
        "content": ContentHash.combine(entries).hex,
        "of": dict(of),
        "shards": [dict(entry) for entry in entries],
    }


def write_json(path: Path, value: Any, lasting: bool = True) -> None:
    """Write a JSON file atomically; if `lasting`, also durably, i.e. synced to disk."""
    write_whole(path, json.dumps(value, indent=1), lasting=lasting)


def read_json(path: Path, shape: Any) -> dict[str, Any]:
    """A record of prepared data, which may be anybody's.

    Raises:
        DataError: if the file is missing or has another shape.
    """
    try:
        return dict(safe_paths.read_json(path.parent, path.name, shape, _LARGEST))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove it and prepare the data again") from error


def is_finished(folder: Path) -> bool:
    """Whether a folder of shards is finished and all its files exist."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    return all((folder / shard["file"]).is_file() for shard in read_manifest(folder)["shards"])
