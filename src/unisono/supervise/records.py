"""What processes and monitors of a run have recorded of its end; the folder may be anybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.runtime import safe_paths
from unisono.runtime.shapes import Integer, Number, misfit


class Fault(TypedDict):
    """What a rank has said of the error that ended it."""

    rank: Integer
    kind: str
    text: str
    code: Integer
    fault: str
    time: Number


class LastPlace(TypedDict):
    """Where a rank was seen last."""

    at: str
    pid: Integer


class Finding(TypedDict):
    """What the monitor of a node has found."""

    code: Integer
    text: str
    host: str
    time: Number
    ranks: dict[str, LastPlace]


def read(folder: Path, pattern: str, shape: Any) -> list[dict[str, Any]]:
    """The records of a folder, in the order of their names; what is none is passed over, as is one half written."""
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
