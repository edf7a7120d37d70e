"""Reads what processes and monitors of a run recorded about its end; the folder is untrusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.runtime import safe_paths
from unisono.runtime.shapes import Integer, Number, misfit


class Fault(TypedDict):
    """The error that ended a rank, as reported by the rank."""

    rank: Integer
    kind: str
    text: str
    code: Integer
    fault: str
    time: Number


class LastPlace(TypedDict):
    """The last known activity of a rank."""

    at: str
    pid: Integer


class Finding(TypedDict):
    """The finding of a node's monitor."""

    code: Integer
    text: str
    host: str
    time: Number
    ranks: dict[str, LastPlace]


def read(folder: Path, pattern: str, shape: Any) -> list[dict[str, Any]]:
    """Return the records in a folder, ordered by name; malformed and half-written ones are skipped."""
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            record = safe_paths.read_json(folder, path.name)
        except (OSError, ValueError):
            continue
        if (
            misfit(record, shape) is None
            and record["text"].strip()
            and all(str(rank).isdecimal() for rank in record.get("ranks", ()))
        ):
            found.append(record)
    return found
