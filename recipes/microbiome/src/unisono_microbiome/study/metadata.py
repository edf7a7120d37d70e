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
_DIRECTIVE = "#q2:"  # with which rows begin that say something of each column
_TYPES, _MISSING = "#q2:types", "#q2:missing"  # what it holds, and how values that are missing are written
_SCHEMES: Mapping[str, tuple[str, ...]] = {
    "blank": (), "no-missing": (),
    "INSDC:missing": ("not applicable", "missing", "not collected", "not provided", "restricted access"),
}  # fmt: skip
Kind = Literal["regression", "classification"]
KINDS: Mapping[str, Kind] = {"numeric": "regression", "categorical": "classification"}
"""What a column of a QIIME 2 type can be as a target."""


@dataclass(frozen=True)
class Metadata:
    """A table of strings.

    Attributes:
        source: where it was read, as messages show it.
        ids: of the rows.
        columns: values per column, the ids' among them.
        types: `numeric` or `categorical`, of the columns that a row `#q2:types` describes.
        missing: what means that there is no value, besides an empty one, of the columns that a row `#q2:missing`
            describes.
    """

    source: str
    ids: list[str]
    columns: dict[str, list[str]]
    types: dict[str, str]
    missing: dict[str, tuple[str, ...]]

    def column(self, name: str, key: str) -> list[str]:
        """The values of a column that a setting names; one that is not there is refused."""
        if name not in self.columns:
            raise ConfigError(f"{key}={name}: {self.source} has no such column, {nearest(name, self.columns)}")
        return self.columns[name]

    def align(self, samples: Sequence[str]) -> dict[str, list[str]]:
        """The columns restricted to these samples, all of which must be present."""
        row = {name: number for number, name in enumerate(self.ids)}
        return {name: [values[row[sample]] for sample in samples] for name, values in self.columns.items()}


def join_metadata(tables: Sequence[Metadata], key: str, id_column: str | None = None) -> Metadata:
    """The rows that all tables have, in the order of the first, with the columns of all, as QIIME 2 merges metadata.

    Args:
        tables: at least one; a column of all but the first's ids may be in one of them only.
        key: the setting that names them, for errors.
        id_column: column of the ids in each; None for the first.
    """
    first, *others = tables
    if not others:
        return first
    shared = set(first.ids).intersection(*(table.ids for table in others))
    ids = [name for name in first.ids if name in shared]
    if not ids:
        shown = "; ".join(f"{table.source} has {format_examples(table.ids) or 'none'}" for table in tables)
        raise DataError(f"{key}: no id is in all files: {shown}; choose data.id_column")
    columns: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    missing: dict[str, tuple[str, ...]] = {}
    where: dict[str, str] = {}
    for table in tables:
        names = list(table.columns)
        if table is not first:
            names.remove(names[0] if id_column is None else id_column)
        if twice := [name for name in names if name in where]:
            files = " and ".join([*dict.fromkeys(where[name] for name in twice), table.source])
            raise DataError(
                f"{key}: columns of the same name: {format_examples(twice)} in {files}; remove or rename one of each"
            )
        where |= dict.fromkeys(names, table.source)
        aligned = table.align(ids)
        columns |= {name: aligned[name] for name in names}
        types |= table.types
        missing |= table.missing
    source = " and ".join(table.source for table in tables)
    return Metadata(f"the join of {source}", ids, columns, types, missing)


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
    artifacts.check_file(path, key, "a table of tab-separated values, a .csv or a .qza")
    with artifacts.open_data(path, key) as inner:
        columns = read_table(
            inner, key=key, comment="#", headers=_HEADERS, directives=[_DIRECTIVE], strip=strip,
            strip_key="data.white_space=strip",
        )  # fmt: skip
    found = Metadata(str(path), [], columns, *_take_directives(f"{path} ({key})", columns))
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
    return Metadata(str(path), ids, columns, found.types, found.missing)


def _take_directives(shown: str, columns: dict[str, list[str]]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """The types of the columns, and what means missing in them, by rows of QIIME 2 that are then removed."""
    first = next(iter(columns.values()))
    names = [name.split()[0] for name in first if name.strip().startswith(_DIRECTIVE)]
    if not all(name.strip().startswith(_DIRECTIVE) for name in first[: len(names)]):
        raise DataError(f"{shown}: '{names[-1]}' must be a line directly after the header, and only there")
    if strange := [name for name in names if name not in (_TYPES, _MISSING)]:
        raise DataError(f"{shown}: there is no line '{strange[0]}' in QIIME 2, but {_TYPES} and {_MISSING}")
    if doubles := find_duplicates(names):
        raise DataError(f"{shown} has two lines '{doubles[0]}'; keep one")
    rows = {
        directive: {name: value for name, values in list(columns.items())[1:] if (value := values[place].strip())}
        for place, directive in enumerate(names)
    }
    for values in columns.values():
        del values[: len(names)]
    types = {name: kind.lower() for name, kind in rows.get(_TYPES, {}).items()}
    schemes = rows.get(_MISSING, {})
    for directive, given, known in ((_TYPES, types, list(KINDS)), (_MISSING, schemes, list(_SCHEMES))):
        if wrong := [f"{value} of {name}" for name, value in given.items() if value not in known]:
            raise DataError(f"{shown}, line '{directive}': {format_examples(wrong)}; valid are {', '.join(known)}")
    for name in (name for name, scheme in schemes.items() if scheme == "no-missing"):
        if none := [sample for sample, value in zip(first, columns[name], strict=True) if not value.strip()]:
            raise DataError(
                f"{shown}, column '{name}' is 'no-missing' by the line '{_MISSING}', but "
                f"{format_share(none, len(first), 'rows')} have no value; give them, or set it to blank"
            )
    return types, {name: _SCHEMES[scheme] for name, scheme in schemes.items()}


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
            others = [text for text, number in zip(named, numbers, strict=True) if number is not None]
            few, what = (words, "not numeric") if len(words) <= len(others) else (others, "numeric")
            raise DataError(
                f"data.target={name}: {format_share(few, len(values), 'values')} are {what}, unlike the others: set "
                "data.target_kind to regression or classification; list values for missing data in data.missing"
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
