"""Reads strict text tables with a few columns, and writes tables, e.g. of predictions."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.errors import ConfigError, DataError, find_duplicates, format_examples, format_share
from unisono.runtime.files import atomic_file
from unisono.runtime.text import escape_controls
from unisono.runtime.untrusted import safe_paths

_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r]")  # the last four as East Asian keyboards write them
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")


def read_table(
    path: Path,
    *,
    key: str = "data.path",
    delimiter: str | None = None,
    comment: str | None = None,
    headers: Collection[str] = (),
    directives: Collection[str] = (),
    strip: bool = False,
    strip_key: str = "",
) -> dict[str, list[str]]:
    """Read a text table as columns of strings by name, in file order; blank lines are skipped.

    Short lines are padded with empty values; a line that is too long is an error.

    Args:
        path: of a file whose first line names the columns.
        key: the setting that names the file, for errors.
        delimiter: between values; None for a comma if the file ends in .csv, and a tab otherwise.
        comment: lines that begin with it are skipped.
        headers: lower-case names of first columns; a line starting with one is the header even if it is a comment.
        directives: beginnings of lines that are rows, although they begin as comments do.
        strip: strip white space around names and values; otherwise, white space around names is an error.
        strip_key: the setting that enables `strip`, for errors, e.g. `data.white_space=strip`.

    Raises:
        DataError: if the file is not such a table, naming file and line.
    """
    if not path.is_file():
        raise DataError(f"{path} ({key}) does not exist; name a text table")
    if delimiter is None:
        delimiter = "," if path.name.lower().endswith(".csv") else "\t"
    try:
        with safe_paths.open_text(path, "utf-8-sig", "") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)  # or an open quote would swallow lines
            lines = [(reader.line_num, line) for line in reader if any(line)]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} ({key}) is not UTF-8 ({error}); save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} ({key}) cannot be read as a table: {error}; is a quotation mark left open?") from error
    if comment is not None:
        head = next((line for line in lines if line[1][0].strip().lower() in headers), None)
        if head is None:
            _refuse_commented_header(path, key, lines, comment, headers)
        kept = [line for line in lines if line is head or line[1][0].strip().startswith(tuple(directives))]
        lines = [line for line in lines if line in kept or not line[1][0].startswith(comment)]
    if not lines:
        raise DataError(f"{path} ({key}) is empty; its first line should name the columns")
    header = [name.strip() for name in lines[0][1]] if strip else lines[0][1]
    while not header[-1].strip():  # as spreadsheets write columns that were emptied; values in them are refused below
        header = header[:-1]
    _check_header(path, key, header, strip_key)
    columns: dict[str, list[str]] = {name: [] for name in header}
    for number, line in lines[1:]:
        if any(line[len(header) :]):
            raise DataError(
                f"{path} ({key}), line {number}: {len(line)} values, but the header has {len(header)} columns; a value "
                "may contain a separator, or a column may have no name"
            )
        padded = [*line[: len(header)], *[""] * (len(header) - len(line))]
        for name, value in zip(header, padded, strict=True):
            columns[name].append(value.strip() if strip else value)
    return columns


def _refuse_commented_header(
    path: Path, key: str, lines: list[tuple[int, list[str]]], comment: str, headers: Collection[str]
) -> None:
    """Refuse a comment that must be the header, since it has as many columns as the first row below it."""
    first = next((place for place, (_, line) in enumerate(lines) if not line[0].startswith(comment)), 0)
    if not first or not 1 < len(lines[first - 1][1]) == len(lines[first][1]):
        return
    number, line = lines[first - 1]
    known = f", or {' or '.join(headers)}" if headers else ""
    raise DataError(
        f"{path} ({key}), line {number}, which begins with '{comment}', is a comment, but seems to name the columns; "
        f"call the first column '{line[0].lstrip(comment).strip() or 'id'}'{known}"
    )


def write_table(path: Path, columns: Mapping[str, Any], *, escape: bool = True) -> Path:
    r"""Write columns of equal length atomically, as .csv, .tsv, .jsonl or .parquet, depending on the path's suffix.

    Args:
        path: of the file.
        columns: lists or arrays by name, lists of arrays included. .csv and .tsv have six digits of each float, and
            lists as JSON.
        escape: whether texts in .csv and .tsv are escaped: a spreadsheet would compute one that begins with `=`, `+`,
            `-` or `@` unless it is a number, so such a text begins with `'`; control characters are written as `\x1b`.

    Raises:
        ConfigError: for any other suffix.
    """
    check_table_suffix(path)
    values = {name: _to_list(column) for name, column in columns.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(*values.values(), strict=True)
    with atomic_file(path) as temporary:
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            arrays = {name: _nest(column) if _holds_arrays(column) else column for name, column in values.items()}
            pq.write_table(pa.table(arrays), temporary)
        elif path.suffix == ".jsonl":
            lines = (
                json.dumps(dict(zip(values, row, strict=True)), ensure_ascii=False, default=_to_list) for row in rows
            )
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t", lineterminator="\n")
                cell = escape_cell if escape else str
                writer.writerow([cell(name) for name in values])
                writer.writerows([_format_value(value, cell) for value in row] for row in rows)
    return path


def check_table_suffix(path: Path) -> None:
    """Reject a path with a suffix that `write_table` does not support."""
    if path.suffix not in TABLE_SUFFIXES:
        raise ConfigError(f"{path}: tables are written as {', '.join(TABLE_SUFFIXES)}; choose one of these endings")


def _check_header(path: Path, key: str, header: list[str], strip_key: str) -> None:
    if padded := [name for name in header if name != name.strip()]:
        raise DataError(
            f"{path} ({key}): white space around the names of {format_share(padded, len(header), 'columns')}; remove "
            "it" + (f", or set {strip_key}" if strip_key else "")
        )
    if doubles := find_duplicates(header):
        raise DataError(f"{path} ({key}) has columns of the same name: {format_examples(doubles)}; rename them")
    if not all(header):
        raise DataError(f"{path} ({key}): column {header.index('') + 1} of {len(header)} has no name; give it one")


def _to_list(column: Any) -> list[Any]:
    """A column as a list of Python values; rows of multi-dimensional arrays become lists."""
    if hasattr(column, "detach"):
        column = column.detach().cpu().numpy()
    return list(np.asarray(column).tolist()) if hasattr(column, "dtype") else list(column)


def _holds_arrays(column: list[Any]) -> bool:
    return bool(column) and all(isinstance(value, np.ndarray) for value in column)


def _nest(rows: list[NDArray[Any]]) -> Any:
    """Arrays, whose shapes may differ between rows, as an Arrow column of nested lists (not through Python numbers)."""
    import pyarrow as pa

    nested = pa.array(np.concatenate([row.ravel() for row in rows]))
    for axis in reversed(range(rows[0].ndim)):
        lengths = np.concatenate([np.full(math.prod(row.shape[:axis]), row.shape[axis]) for row in rows])
        nested = pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]), nested)
    return nested


def escape_cell(text: str) -> str:
    r"""Escape a text for a cell of a spreadsheet, which must not compute it, and for a terminal that shows the file.

    >>> escape_cell("=1+1"), escape_cell("-0.5"), escape_cell("a\x1b[2J")
    ("'=1+1", '-0.5', 'a\\x1b[2J')
    """
    return (
        f"'{escape_controls(text)}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else escape_controls(text)
    )


def _format_value(value: Any, cell: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return cell(value)
    if isinstance(value, list | np.ndarray):
        return json.dumps(value, default=_to_list)
    return f"{value:.6g}" if isinstance(value, float) else value
