"""The progress of a scan or a cache: a line of JSON for each finished chunk of rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from unisono.runtime.errors import DataError
from unisono.runtime.untrusted import safe_paths

_CHUNK_ROWS = 64


RowNumber = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]  # a key of JSON


def read_journal(path: Path, *shapes: Any) -> list[dict[str, Any]]:
    """The entries of a file, none if it does not exist.

    The first has the first of the shapes, and so on; all others have the last.

    A last line that an interruption cut off is removed from the file, so that the next entry does not continue it.
    """
    content = safe_paths.read_regular(path) if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        return [
            safe_paths.parse_json(line, shapes[min(number, len(shapes) - 1)])
            for number, line in enumerate(whole.splitlines())
        ]
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}; remove it to begin again") from error


def chunks(rows: int) -> list[range]:
    """The numbers of the rows, in chunks."""
    return [range(first, min(first + _CHUNK_ROWS, rows)) for first in range(0, rows, _CHUNK_ROWS)]
