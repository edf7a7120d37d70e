"""Reads a given distance matrix from a file: NumPy, HDF5, tab-separated values or QIIME 2."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, file_hash
from unisono.recipe_tools import (
    archives,
    check_hdf5,
    find_duplicates,
    format_examples,
    format_share,
    safe_paths,
    wrap_native_errors,
)
from unisono_microbiome.settings import PairMetric
from unisono_microbiome.study import artifacts

NAMES: Mapping[str, tuple[str, ...]] = {
    "unweighted_unifrac": ("unweighted_unifrac", "unweighted"),
    "weighted_unifrac": ("weighted_unifrac", "weighted", "weighted_unnormalized"),
    "weighted_normalized_unifrac": ("weighted_normalized_unifrac", "weighted_normalized"),
    "bray_curtis": ("bray_curtis", "braycurtis"),
    "jaccard": ("jaccard",),
    "aitchison": ("aitchison",),
}
"""What arrays of each metric are called."""

BOUNDED = frozenset(NAMES) - {"weighted_unifrac", "aitchison"}
"""Metrics that are never above 1."""

_ID_NAMES = ("sample_ids", "ids", "order", "samples")
_SYMMETRY_TOLERANCE = 1e-6  # between both halves of a matrix, of its largest distance, for fp32 and printed numbers
IdsAndDistances = tuple[list[str] | None, NDArray[Any]]


@dataclass(frozen=True)
class Matrix:
    """A file with distances between all pairs of its samples; it is read when it is first asked for.

    Attributes:
        path: .npy, .npz, .h5, .hdf5, .tsv, .txt or .qza.
        metric: what it is to hold.
        key: array of a .npz or .h5; None for the one that is called like the metric, or the only one.

    Raises:
        DataError: when it is read, for what is no matrix of distances, or has ids twice.
    """

    path: Path
    metric: PairMetric
    key: str | None = None

    @property
    def ids(self) -> list[str] | None:
        """Ids of its samples, in order; None for files that have none, whose rows are those of the table."""
        return self._read[0]

    @property
    def values(self) -> NDArray[np.float64]:
        """Distances, (samples, samples) float64, symmetric, with a diagonal of 0."""
        return self._read[1]

    @cached_property
    def digest(self) -> str:
        """What the file holds, in hex."""
        return file_hash(self.path)

    @cached_property
    def _read(self) -> tuple[list[str] | None, NDArray[np.float64]]:
        artifacts.check_file(self.path, "data.distances", "a distance matrix")
        readers: dict[str, Callable[[], IdsAndDistances]] = {
            ".npy": self._npy,
            ".npz": self._npz, ".h5": self._h5, ".hdf5": self._h5, ".tsv": self._tsv, ".txt": self._tsv,
            ".qza": self._qza,
        }  # fmt: skip
        reader = readers.get(self.path.suffix.lower())
        if reader is None:
            raise ConfigError(f"{self}: unsupported format; use {', '.join(readers)}")
        with wrap_native_errors(f"{self} cannot be read"):
            ids, found = reader()
        if ids is not None and (doubles := find_duplicates(ids)):
            raise DataError(f"{self} has duplicate ids: {format_share(doubles, len(ids), 'ids')}; keep one row of each")
        return ids, self._validate(ids, np.asarray(found))

    # formats ----------------------------------------------------------------------------------------------------

    def _npy(self) -> IdsAndDistances:
        path = self.path.resolve()  # a link that the user names is followed
        return None, safe_paths.load_array(path.parent, path.name)

    def _npz(self) -> IdsAndDistances:
        with safe_paths.open_regular(self.path) as file:
            arrays = archives.load_arrays(file)
            ids = next((arrays[name] for name in _ID_NAMES if name in arrays), None)
            name = self._select_array({name: arrays[name].ndim for name in arrays if name not in _ID_NAMES})
            return _strings(ids), arrays[name]

    def _h5(self) -> IdsAndDistances:
        import h5py

        check_hdf5(self.path, self)
        with safe_paths.open_regular(self.path) as opened, h5py.File(safe_paths.path_of(opened)) as file:
            arrays = {name: one for name, one in file.items() if isinstance(one, h5py.Dataset)}
            ids = next((arrays[name].asstr()[:] for name in _ID_NAMES if name in arrays), None)
            name = self._select_array({name: one.ndim for name, one in arrays.items() if one.dtype.kind == "f"})
            return _strings(ids), arrays[name][:]

    def _tsv(self) -> IdsAndDistances:
        with safe_paths.open_text(self.path, "utf-8-sig", "") as file:
            return self._parse_lines(file)

    def _qza(self) -> IdsAndDistances:
        with artifacts.open_data(self.path, "data.distances") as inner, safe_paths.open_text(inner) as file:
            return self._parse_lines(file)

    def _parse_lines(self, lines: Iterable[str]) -> IdsAndDistances:
        """A table whose header has an empty field and the ids, and whose lines have an id and the distances."""
        table = [(n, line) for n, line in enumerate(csv.reader(lines, delimiter="\t"), start=1) if any(line)]
        table = table[next((at for at, (_, line) in enumerate(table) if not line[0].startswith("#")), len(table)) :]
        if not table:
            raise DataError(f"{self} is empty; its first line should be a tab and the ids")
        ids, rows = table[0][1][1:], []
        for number, line in table[1:]:
            if len(line) != len(ids) + 1:
                raise DataError(f"{self}, line {number}: {len(line) - 1} distances, but the header has {len(ids)} ids")
            try:
                rows.append(np.array(line[1:], dtype=np.float64))
            except ValueError as error:
                raise DataError(f"{self}, line {number}: {error}; distances must be numbers") from error
        for row, ((_, line), column) in enumerate(zip(table[1:], ids, strict=False), start=1):
            if line[0] != column:
                raise DataError(
                    f"{self}: row {row} is '{line[0]}', but column {row} is '{column}'; use the same order for both"
                )
        return ids, np.array(rows).reshape(len(rows), len(ids))

    def _select_array(self, arrays: Mapping[str, int]) -> str:
        """The array that holds the metric, of those in the file, by name with their numbers of axes."""
        if self.key is not None:
            if self.key not in arrays:
                raise ConfigError(
                    f"data.distances_key={self.key}: {self.path} has {format_examples(list(arrays)) or 'no arrays'}"
                )
            return self.key
        found = [name for name in arrays if name.lower() in NAMES[self.metric]]
        if not found and "matrix" in arrays:  # as scikit-bio and unifrac-binaries call it, beside an ordination
            found = ["matrix"]
        if not found and len(arrays) == 1:
            found = [name for name in arrays if not any(name.lower() in names for names in NAMES.values())]
        if len(found) != 1:
            raise ConfigError(
                f"{self} has {format_examples(list(arrays)) or 'no arrays'}, but none for data.metric={self.metric}: "
                "set data.distances_key to the name of the array"
            )
        return found[0]

    # what distances are -----------------------------------------------------------------------------------------

    def _validate(self, ids: Sequence[str] | None, found: NDArray[Any]) -> NDArray[np.float64]:
        if found.dtype.kind not in "fiu":
            raise DataError(f"{self} has dtype {found.dtype}, but distances must be numbers")
        matrix = _square(found.astype(np.float64))
        if matrix is None:
            raise DataError(f"{self} has shape {found.shape}; a distance matrix is square, with a row for each sample")
        if ids is not None and len(ids) != len(matrix):
            raise DataError(f"{self} has {len(ids)} ids but {len(matrix)} rows; it should have one id per row")
        name = [f"row {number}" for number in range(len(matrix))] if ids is None else ids
        close = _SYMMETRY_TOLERANCE * max(float(matrix.max(initial=0.0)), 1e-300)
        bound = 1 + _SYMMETRY_TOLERANCE if self.metric in BOUNDED else math.inf
        with np.errstate(invalid="ignore"):  # the first check is of what is not finite
            halves = abs(matrix - matrix.T)
        for wrong, what, remedy in (
            (~np.isfinite(matrix), "not finite", "compute them again without samples that have no reads"),
            (matrix < 0, "below 0", "is it another kind of matrix?"),
            (np.diag(np.diag(matrix) > close), "of a sample to itself and not 0", "is it a similarity matrix?"),
            (halves > close, "different in the other half of the matrix", "it should be symmetric"),
            (matrix > bound, f"above 1, the maximum of {self.metric}", "choose the right data.metric"),
        ):
            if wrong.any():
                pairs = [f"{matrix[i, j]:g} between {name[i]} and {name[j]}" for i, j in np.argwhere(wrong)[:4]]
                raise DataError(
                    f"{self}: {int(wrong.sum())} of {matrix.size} values are {what} ({format_examples(pairs)}); "
                    f"{remedy}"
                )
        matrix = (matrix + matrix.T) / 2
        np.fill_diagonal(matrix, 0.0)
        return matrix

    def __str__(self) -> str:
        return f"{self.path} (data.distances)"


def align_matrix(matrix: Matrix, samples: Sequence[str], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The distances between some samples, by their ids, else by their rows in the table, (samples, samples)."""
    if matrix.ids is not None:
        row = {name: number for number, name in enumerate(matrix.ids)}
        rows = np.array([row[name] for name in samples], dtype=np.int64)
    return matrix.values[np.ix_(rows, rows)]


def _strings(ids: Any) -> list[str] | None:
    if ids is not None and np.ndim(ids) != 1:
        raise ValueError(f"its ids have shape {np.shape(ids)}; give a list of them")
    return None if ids is None else [name.decode() if isinstance(name, bytes) else str(name) for name in ids]


def _square(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """A square matrix, or the half of one that is written row by row, as a square matrix; None for all else."""
    if values.ndim == 1 and len(values):
        from scipy.spatial.distance import squareform

        with suppress(ValueError):  # of another number of values
            return np.asarray(squareform(values))
    return values if values.ndim == 2 and values.shape[0] == values.shape[1] else None
