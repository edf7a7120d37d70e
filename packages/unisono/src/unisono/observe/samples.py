"""What a run shows besides numbers: texts, pictures, sounds and tables, for its folder, its events and its trackers.

Pictures become PNG files in `samples/` of the run's folder; texts and tables stand in `events.jsonl`, cut to a size
that a file of events can bear. Trackers get the same.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.runtime.errors import ConfigError
from unisono.runtime.files import atomic_file
from unisono.runtime.untrusted import safe_writing

FOLDER = "samples"  # in the run directory
MEDIA = {".png": "picture", ".wav": "sound"}  # what a tracker does with a file, by its suffix
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_TEXT = 4000  # characters of a text
_MAX_ROWS, _MAX_COLUMNS, _MAX_CELL = 50, 20, 200  # of a table


@dataclass(frozen=True)
class Sample:
    """Something to show.

    Attributes:
        kind: picture, sound, text or table: the method of a tracker that shows it.
        content: what that method is given: a file, a text, or a table's columns and rows.
        event: what `events.jsonl` says of it; None for a file that its owner has written.
    """

    kind: str
    content: tuple[Any, ...]
    event: Mapping[str, Any] | None


def prepare_sample(folder: Path, step: int, name: str, value: Any) -> Sample:
    """Turn what a task or a callback shows into what can be recorded.

    Args:
        folder: Of the run; pictures are written into it.
        step: Updates made.
        name: To show it under.
        value: A file (PNG or WAV), a text, a PNG as bytes, a picture as an array of bytes or of numbers from 0 to 1
            with the shape (rows, columns) or (rows, columns, 3 or 4), or a table as a list of dictionaries.

    Raises:
        ConfigError: For anything else.
    """
    if isinstance(value, Path):
        if value.suffix not in MEDIA:
            raise ConfigError(f"'{name}': trackers show PNG and WAV files, not {value.name}")
        return Sample(MEDIA[value.suffix], (value,), None)
    if isinstance(value, str):
        text = _cut(value, _MAX_TEXT)
        return Sample("text", (text,), {"text": text})
    if isinstance(value, bytes):
        if not value.startswith(_PNG):
            raise ConfigError(f"'{name}': bytes are shown as a picture if they are a PNG file; these are not")
        return _write_picture(folder, step, name, value)
    if isinstance(value, Sequence) and all(isinstance(row, Mapping) for row in value):
        columns, rows = _bound_table(value)
        return Sample("table", (columns, rows), {"columns": columns, "rows": rows})
    if hasattr(value, "__array__"):
        return _write_picture(folder, step, name, encode_png(name, np.asarray(value)))
    raise ConfigError(
        f"'{name}': a {type(value).__name__} cannot be shown; give a text, a picture (an array, or PNG as bytes), a "
        "table (a list of dictionaries), or the path of a PNG or WAV file"
    )


def encode_png(name: str, pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file of a picture.

    Raises:
        ConfigError: If the array is not a picture.
    """
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise ConfigError(
            f"'{name}': a picture has the shape (rows, columns) or (rows, columns, 3 or 4), not {pixels.shape}"
        )
    if pixels.dtype != np.uint8:
        if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
            raise ConfigError(f"'{name}': a picture has bytes (uint8), or numbers from 0 to 1")
        pixels = np.round(pixels.astype(np.float64) * 255).astype(np.uint8)
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return _PNG + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _write_picture(folder: Path, step: int, name: str, content: bytes) -> Sample:
    file = f"step-{step:08d}-{re.sub(r'[^A-Za-z0-9_.=-]+', '-', name)[:100]}.png"
    path = safe_writing.make_folder(folder, FOLDER) / file
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
    return Sample("picture", (path,), {"file": str(path.relative_to(folder))})


def _bound_table(table: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    columns = [*dict.fromkeys(str(column) for row in table for column in row)][:_MAX_COLUMNS]
    named = [{str(column): value for column, value in row.items()} for row in table[:_MAX_ROWS]]
    return columns, [[_cell(row.get(column)) for column in columns] for row in named]


def _cell(value: Any) -> Any:
    """A value of a table as JSON: numbers stay numbers, everything else becomes a text."""
    if hasattr(value, "__array__") and np.asarray(value).size == 1:
        value = np.asarray(value).item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    return _cut(str(value), _MAX_CELL)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
