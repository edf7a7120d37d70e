"""What is known of the samples: a table as QIIME 2 and Qiita write it, and a column of it that is to be predicted."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.microbiome.told import examples, how_many, twice
from unisono.runtime.errors import ConfigError, DataError, nearest

_HEADS = ("#sampleid", "#sample id", "#sample-id", "#otuid", "#otu id", "#otu-id", "#feature id")  # else a comment


@dataclass(frozen=True)
class Metadata:
    """A table of strings.

    Attributes:
        path: where it was read.
        ids: of the rows.
        columns: values per column, the ids' among them.
    """

    path: Path
    ids: list[str]
    columns: dict[str, list[str]]

    def column(self, name: str, key: str) -> list[str]:
        """The values of a column that a setting names.

        Raises:
            ConfigError: where there is none of this name.
        """
        if name not in self.columns:
            raise ConfigError(f"{key}={name}: {self.path} has no such column, {nearest(name, self.columns)}")
        return self.columns[name]

    def aligned(self, samples: Sequence[str]) -> dict[str, list[str]]:
        """The columns with a value for each of these samples, all of which must be there."""
        row = {name: number for number, name in enumerate(self.ids)}
        return {name: [values[row[sample]] for sample in samples] for name, values in self.columns.items()}


def read(path: Path, key: str, id_column: str | None = None, strip: bool = False, used: Sequence[str] = ()) -> Metadata:
    """A table of tab-separated values, or of comma-separated ones where its name ends in `.csv`.

    Lines that begin with `#` are comments, unless they are the header (`#SampleID`). Values that a short line lacks at
    its end are empty.

    Args:
        path: of it.
        key: the setting that names it, for errors.
        id_column: column of the ids; None for the first.
        strip: white space around names and values is taken away; else it is refused in names, ids and `used`.
        used: columns whose values matter.

    Raises:
        ConfigError: for a column that is not there.
        DataError: for a file that is no such table, and for ids that are there twice.
    """
    lines = list(_lines(path, key))
    if not lines:
        raise DataError(f"{path} ({key}) is empty; its first line should name the columns")
    (_, header), *rows = lines
    header = [name.strip() for name in header] if strip else header
    _refuse_header(path, key, header)
    width = len(header)
    for number, values in rows:
        if any(values[width:]):
            raise DataError(
                f"{path} ({key}), line {number}: {len(values)} values, and the header has {width} columns; a value may "
                "hold a separator, or a column lack its name"
            )
    columns = {name: [(row[place] if place < len(row) else "") for _, row in rows] for place, name in enumerate(header)}
    if strip:
        columns = {name: [value.strip() for value in values] for name, values in columns.items()}
    ids_of = header[0] if id_column is None else id_column
    found = Metadata(path, [], columns)
    ids = found.column(ids_of, "data.id_column")
    for name in dict.fromkeys([ids_of, *(name for name in used if name in columns)]):
        _refuse_white_space(path, key, name, columns[name])
    if doubles := twice(ids):
        raise DataError(
            f"{path} ({key}), column '{ids_of}', has ids more than once: {how_many(doubles, len(ids), 'rows')}; keep "
            "one row of each, or choose another data.id_column"
        )
    return Metadata(path, ids, columns)


def _lines(path: Path, key: str) -> list[tuple[int, list[str]]]:
    """The lines with something in them, with their numbers, comments left out; the header is the first."""
    if not path.is_file():
        raise DataError(f"{path} ({key}) is not there; give a table of tab-separated values")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = "," if path.suffix.lower() == ".csv" else "\t"
            reader = csv.reader(file, delimiter=separator, strict=True)  # or an open quote would swallow lines
            lines = [(reader.line_num, line) for line in reader if any(line)]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} ({key}) is not UTF-8 ({error}); save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} ({key}) cannot be read as a table: {error}; is a quote left open?") from error
    return [
        (number, line)
        for place, (number, line) in enumerate(lines)
        if not line[0].startswith("#") or (line[0].strip().lower() in _HEADS and place == _first_head(lines))
    ]


def _first_head(lines: list[tuple[int, list[str]]]) -> int:
    return next((place for place, (_, line) in enumerate(lines) if line[0].strip().lower() in _HEADS), -1)


def _refuse_header(path: Path, key: str, header: list[str]) -> None:
    if padded := [name for name in header if name != name.strip()]:
        raise DataError(
            f"{path} ({key}): white space around the names of {how_many(padded, len(header), 'columns')}; take it "
            "away, or set data.white_space=strip"
        )
    if doubles := twice(header):
        raise DataError(f"{path} ({key}) has columns of the same name: {examples(doubles)}; rename them")
    if not all(header):
        raise DataError(f"{path} ({key}): column {header.index('') + 1} of {len(header)} has no name; give it one")


def _refuse_white_space(path: Path, key: str, column: str, values: list[str]) -> None:
    if padded := [value for value in values if value != value.strip()]:
        raise DataError(
            f"{path} ({key}), column '{column}': white space around {how_many(padded, len(values), 'values')}, which "
            "makes others of them; take it away, or set data.white_space=strip"
        )


@dataclass(frozen=True, eq=False)
class Target:
    """What is to be predicted of each sample.

    Attributes:
        name: of the column.
        kind: `regression` or `classification`.
        classes: in the order of their numbers; None in regression.
        values: (samples,), float64, or int64 numbers of classes.
    """

    name: str
    kind: Literal["regression", "classification"]
    classes: list[str] | None
    values: NDArray[np.float64] | NDArray[np.int64]


def target_of(
    name: str,
    values: Sequence[str],
    samples: Sequence[str],
    kind: Literal["auto", "regression", "classification"] = "auto",
    classes: Sequence[str] | None = None,
) -> Target:
    """A column as what is to be predicted; none of its values may be missing.

    Raises:
        DataError: for values that are no numbers in a regression, not finite, all the same, or of no known class.
    """
    if kind == "auto":
        kind = "classification" if classes is not None else _kind_of(name, values, samples)
    if kind == "regression":
        numbers = [_number(value) for value in values]
        wrong = [
            f"{value} of {sample}"
            for value, number, sample in zip(values, numbers, samples, strict=True)
            if number is None or not math.isfinite(number)
        ]
        if wrong:
            raise DataError(
                f"data.target={name}: {how_many(wrong, len(values), 'values')} are no finite numbers. For classes set "
                "data.target_kind=classification; values that mean none belong into data.missing, and "
                "data.leave_out=[no_target] leaves their samples out"
            )
        found: NDArray[np.float64] | NDArray[np.int64] = np.array(numbers, dtype=np.float64)
        known = None
    else:
        known = sorted(set(values)) if classes is None else list(classes)
        number_of = {name: number for number, name in enumerate(known)}
        if strange := [f"{v} of {s}" for v, s in zip(values, samples, strict=True) if v not in number_of]:
            raise DataError(
                f"data.target={name}: {how_many(strange, len(values), 'values')} are none of data.classes "
                f"({examples(known)}); add them, or leave data.classes out"
            )
        if classes is None and len(known) == len(values) > 1:
            raise DataError(
                f"data.target={name}: the classes of all {len(values)} samples are different ({examples(values)}); "
                "choose a column of classes"
            )
        found = np.array([number_of[value] for value in values], dtype=np.int64)
    if len(np.unique(found)) < 2 and (classes is None or len(classes) < 2):
        raise DataError(
            f"data.target={name} is '{values[0]}' in all {len(values)} samples: there is nothing to predict; choose "
            "another column"
        )
    return Target(name, kind, known, found)


def _kind_of(name: str, values: Sequence[str], samples: Sequence[str]) -> Literal["regression", "classification"]:
    """What a column seems to be; one typing error must not make classes of numbers, so a mixture is neither."""
    words = [f"{v} of {s}" for v, s in zip(values, samples, strict=True) if _number(v) is None]
    if 0 < len(words) < len(values):
        raise DataError(
            f"data.target={name}: {how_many(words, len(values), 'values')} are no numbers, and the others are: say by "
            "data.target_kind whether it is a regression or a classification; what means none belongs into data.missing"
        )
    return "classification" if words else "regression"


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def missing(values: Sequence[str], markers: Sequence[str]) -> NDArray[np.bool_]:
    """Which values mean none, (values,)."""
    known = {marker.strip().lower() for marker in markers}
    return np.array([value.strip().lower() in known for value in values], dtype=bool)
