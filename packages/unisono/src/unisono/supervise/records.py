"""Reads what processes and monitors of a run recorded about its end; the folder is untrusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count, Integer, Number

Rank = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # a key of JSON
Text = Annotated[str, Field(pattern=r"\S")]


class Fault(TypedDict):
    """The error that ended a rank, as reported by the rank."""

    rank: Count
    kind: str
    text: Text
    code: Integer
    fault: str
    time: Number


class LastPlace(TypedDict):
    """The last known activity of a rank."""

    at: str
    pid: Integer
    where: NotRequired[str]


class Finding(TypedDict):
    """The finding of a node's monitor."""

    code: Integer
    text: Text
    host: str
    time: Number
    ranks: dict[Rank, LastPlace]
    stacks: NotRequired[str]


def read(folder: Path, pattern: str, shape: Any) -> list[dict[str, Any]]:
    """Return the records in a folder, ordered by name; malformed and half-written ones are skipped."""
    found = []
    for path in sorted(folder.glob(pattern)):
        try:
            found.append(safe_paths.read_json(folder, path.name, shape))
        except (OSError, ValueError):
            continue
    return found
