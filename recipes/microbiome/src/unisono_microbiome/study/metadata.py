"""Metadata of the samples: a table as QIIME 2 and Qiita write it, and its target column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, read_table
from unisono.recipe_tools import find_duplicates, format_examples, format_share, nearest
from unisono_microbiome.study import artifacts

_HEADERS = ("#sampleid", "#sample id", "#sample-id", "#otuid", "#otu id", "#otu-id", "#feature id")  # else a comment
_TYPES = "#q2:types"  # the id of a row that says of each column what it holds
Kind = Literal["regression", "classification"]
KINDS: Mapping[str, Kind] = {"numeric": "regression", "categorical": "classification"}
"""What a column of a QIIME 2 type can be as a target."""


@dataclass(frozen=True)
class Metadata:
    """A table of strings.

    Attributes:
        path: where it was read.
        ids: of the rows.
        columns: values per column, the ids' among them.
        types: `numeric` or `categorical`, of the columns that a row `#q2:types` describes.
    """

    path: Path
    ids: list[str]
    columns: dict[str, list[str]]
    types: dict[str, str]

    def column(self, name: str, key: str) -> list[str]:
        """The values of a column that a setting names; one that is not there is refused."""
        if name not in self.columns:
            raise ConfigError(f"{key}={name}: {self.path} has no such column, {nearest(name, self.columns)}")
        return self.columns[name]

    def align(self, samples: Sequence[str]) -> dict[str, list[str]]:
        """The columns restricted to these samples, all of which must be present."""
        row = {name: number for number, name in enumerate(self.ids)}
        return {name: [values[row[sample]] for sample in samples] for name, values in self.columns.items()}


def read_metadata(
    path: Path, key: str, id_column: str | None = None, strip: bool = False, used: Sequence[str] = ()
) -> Metadata:
    """A table of tab-separated values, or of comma-separated ones where its name ends in `.csv`.

    Lines that begin with `#` are comments, unless they are the header (`#SampleID`).

    Args:
        path: of it.
        key: the setting that names it, for errors.
        id_column: column of the ids; None for the first.
        strip: white space around names and values is taken away; else it is refused in names, ids and `used`.
        used: columns whose values matter.
    """
    with artifacts.open_data(path, key) as inner:
        columns = read_table(
            inner, key=key, comment="#", headers=_HEADERS, directives=[_TYPES], strip=strip,
            strip_key="data.white_space=strip",
        )  # fmt: skip
    found = Metadata(path, [], columns, _take_types(path, key, columns))
    ids_of = next(iter(columns)) if id_column is None else id_column
    ids = found.column(ids_of, "data.id_column")
    for name in dict.fromkeys([ids_of, *(name for name in used if name in columns)]):
        if padded := [value for value in columns[name] if value != value.strip()]:
            raise DataError(
                f"{path} ({key}), column '{name}': white space around {format_share(padded, len(ids), 'values')}, "
                "which makes them different values; remove it, or set data.white_space=strip"
            )
    if doubles := find_duplicates(ids):
        raise DataError(
            f"{path} ({key}), column '{ids_of}', has duplicate ids: {format_share(doubles, len(ids), 'rows')}; keep "
            "one row of each, or choose another data.id_column"
        )
    return Metadata(path, ids, columns, found.types)


def _take_types(path: Path, key: str, columns: dict[str, list[str]]) -> dict[str, str]:
    """The types of the columns, by a row of QIIME 2 that is then removed."""
    first = next(iter(columns.values()))
    rows = [number for number, name in enumerate(first) if name.strip() == _TYPES]
    if not rows:
        return {}
    if rows != [0]:
        raise DataError(f"{path} ({key}): '{_TYPES}' must be the first line after the header, and only there")
    declared = {name: values.pop(0).strip().lower() for name, values in columns.items()}
    types = {name: kind for name, kind in list(declared.items())[1:] if kind}
    if wrong := [f"{kind} of {name}" for name, kind in types.items() if kind not in KINDS]:
        raise DataError(
            f"{path} ({key}), line '{_TYPES}': {format_examples(wrong)}; the types are numeric and categorical"
        )
    return types


@dataclass(frozen=True, eq=False)
class TargetColumn:
    """The prediction target of each sample.

    Attributes:
        name: of the column.
        kind: `regression` or `classification`.
        classes: in the order of their numbers; None in regression.
        values: (samples,), float64, or int64 numbers of classes.
    """

    name: str
    kind: Kind
    classes: list[str] | None
    values: NDArray[np.float64] | NDArray[np.int64]


def parse_target(
    name: str,
    values: Sequence[str],
    samples: Sequence[str],
    kind: Literal["auto"] | Kind = "auto",
    classes: Sequence[str] | None = None,
) -> TargetColumn:
    """Parse a column as the prediction target; none of its values may be missing.

    Raises:
        DataError: for values that are not numbers in a regression, not finite, all the same, or of no known class.
    """
    named = [f"{value} of {sample}" for value, sample in zip(values, samples, strict=True)]
    numbers = [parse_number(value) for value in values]
    if kind == "auto" and classes is not None:
        kind = "classification"
    elif kind == "auto":  # one typing error must not make classes of numbers, so a mixture is neither
        words = [text for text, number in zip(named, numbers, strict=True) if number is None]
        if 0 < len(words) < len(values):
            raise DataError(
                f"data.target={name}: {format_share(words, len(values), 'values')} are not numeric although the others "
                "are: set data.target_kind to regression or classification; list values for missing data in "
                "data.missing"
            )
        kind = "classification" if words else "regression"
    known = None
    if kind == "regression":
        wrong = [t for t, number in zip(named, numbers, strict=True) if number is None or not math.isfinite(number)]
        if wrong:
            raise DataError(
                f"data.target={name}: {format_share(wrong, len(values), 'values')} are not finite numbers. For classes "
                "set data.target_kind=classification; list values for missing data in data.missing, and "
                "data.leave_out=[no_target] skips their samples"
            )
        found: NDArray[np.float64] | NDArray[np.int64] = np.array(numbers, dtype=np.float64)
    else:
        known = sorted(set(values)) if classes is None else list(classes)
        number_of = {name: number for number, name in enumerate(known)}
        if strange := [text for text, value in zip(named, values, strict=True) if value not in number_of]:
            raise DataError(
                f"data.target={name}: {format_share(strange, len(values), 'values')} are not among data.classes "
                f"({format_examples(known)}); add them, or remove data.classes"
            )
        if classes is None and len(known) == len(values) > 1:
            raise DataError(
                f"data.target={name}: all {len(values)} samples have different classes "
                f"({format_examples(values)}); choose a column of classes"
            )
        found = np.array([number_of[value] for value in values], dtype=np.int64)
    if len(np.unique(found)) < 2 and (classes is None or len(classes) < 2):
        raise DataError(
            f"data.target={name} is '{values[0]}' in all {len(values)} samples: there is nothing to predict; choose "
            "another column"
        )
    return TargetColumn(name, kind, known, found)


def is_missing(values: Sequence[str], markers: Sequence[str]) -> NDArray[np.bool_]:
    """Which values are missing, (values,)."""
    known = {marker.strip().lower() for marker in markers}
    return np.array([value.strip().lower() in known for value in values], dtype=bool)


def parse_number(value: str) -> float | None:
    """The number that a value is; None for a text, also for one such as `1_000`, which Python alone takes for one."""
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None
