"""The progress of a scan or a cache: a line of JSON for each finished chunk of rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unisono.runtime import safe_paths

_CHUNK_ROWS = 64


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The entries of a file, none if it does not exist.

    A last line that an interruption cut off is removed from the file, so that the next entry does not continue it.
    """
    content = safe_paths.read_regular(path) if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def chunks(rows: int) -> list[range]:
    """The numbers of the rows, in chunks."""
    return [range(first, min(first + _CHUNK_ROWS, rows)) for first in range(0, rows, _CHUNK_ROWS)]
