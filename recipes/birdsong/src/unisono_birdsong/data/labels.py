"""Classes of recordings and their names: integers, lists of them, or nulls; text is refused, not numbered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unisono import ConfigError, DataError
from unisono.recipe_tools import nearest, safe_paths
from unisono_audio.sources import Recordings

Labels = tuple[int, ...] | None  # of a row; None where they are not known


def classes_of(value: Any, column: str, row: int, key: str) -> tuple[int, ...] | None:
    """Classes of a row, ascending; None of a null.

    Raises:
        DataError: for what is no integer and no list of them, naming column, row and remedy.
    """
    if value is None:
        return None
    numbers = value if isinstance(value, list | tuple | np.ndarray) else [value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            shown = "text" if isinstance(number, str) else type(number).__name__
            raise DataError(
                f"{key}: column '{column}' has {shown} in row {row} (from 0), {number!r}; labels are integers (a "
                "ClassLabel), lists of them, or null. Map its values to numbers where the data is written, or choose "
                "another column by data.label"
            )
        if number < 0:
            raise DataError(
                f"{key}: column '{column}' has the class {number} in row {row} (from 0); classes begin at 0"
            )
    return tuple(sorted({int(number) for number in numbers}))


def class_names(
    given: str | None, source: Recordings, label: str | None, labels: Sequence[Labels] | None, key: str
) -> list[str] | None:
    """Names by class; None where nothing says them.

    Args:
        given: the setting `data.names`: a column, or a file.
        source: of the recordings.
        label: the column of the classes.
        labels: classes of each row.
        key: the setting that names the recordings, for errors.
    """
    if given is None:
        names = source.class_names(label) if label else None
    elif given.endswith(".json"):
        names = _names_in_file(Path(given))
    else:
        names = _names_in_column(source, given, labels, key)
    largest = max((number for label in labels or () for number in label or ()), default=-1)
    if names is not None and largest >= len(names):
        raise DataError(f"{key}: column '{label}' has the class {largest}, and there are names of {len(names)} classes")
    return names


def _names_in_file(path: Path) -> list[str]:
    try:
        found = safe_paths.read_json(path.parent, path.name, dict[str, int])
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.names={path} cannot be read: {error}") from error
    numbers = list(found.values())
    if not numbers or {*numbers} != {*range(len(numbers))}:
        raise ConfigError(f"data.names={path} is not an object {{name: class}} with the classes 0, 1, 2, …")
    return sorted(found, key=lambda name: found[name])


def _names_in_column(source: Recordings, column: str, labels: Sequence[Labels] | None, key: str) -> list[str]:
    if column not in source.columns:
        raise DataError(f"data.names={column}: there is no such column, {nearest(column, source.columns)}")
    known: dict[int, str] = {}
    for row, (label, name) in enumerate(zip(labels or (), source.read_columns([column])[column], strict=False)):
        if label is not None and len(label) == 1 and known.setdefault(label[0], str(name)) != str(name):
            raise DataError(
                f"{key}, row {row} (from 0): class {label[0]} is '{name}' here and '{known[label[0]]}' in a row before "
                f"(data.names={column})"
            )
    return [known.get(number, f"class {number}") for number in range(max(known, default=-1) + 1)]


def number_classes(labels: Sequence[Labels]) -> list[str]:
    """Names for classes of which only the number is known."""
    largest = max((number for label in labels for number in label or ()), default=-1)
    return [f"class {number}" for number in range(largest + 1)]
