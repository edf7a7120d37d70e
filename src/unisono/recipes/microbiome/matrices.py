"""Distances that were made before: a matrix from a file of NumPy, HDF5, tab-separated values or QIIME 2."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.microbiome.settings import PairMetric
from unisono.recipes.microbiome.told import examples, how_many, twice
from unisono.runtime.errors import ConfigError, DataError

NAMES: Mapping[str, tuple[str, ...]] = {
    "unweighted_unifrac": ("unweighted_unifrac", "unweighted"),
    "weighted_unifrac": ("weighted_unifrac", "weighted", "weighted_unnormalized"),
    "weighted_normalized_unifrac": ("weighted_normalized_unifrac", "weighted_normalized"),
    "bray_curtis": ("bray_curtis", "braycurtis"),
    "jaccard": ("jaccard",),
}
"""What arrays of each metric are called."""

BOUNDED = frozenset(NAMES) - {"weighted_unifrac"}
"""Metrics that are never above 1."""

_IDS = ("sample_ids", "ids", "order", "samples")
_SAME = 1e-6  # of the largest distance: what fp32 and printed numbers leave between both halves of a matrix


@dataclass(frozen=True)
class Matrix:
    """A file with distances between all pairs of its samples; it is read when it is first asked for.

    Attributes:
        path: .npy, .npz, .h5, .hdf5, .tsv, .txt or .qza.
        metric: what it is to hold.
        key: array of a .npz or .h5; None for the one that is called like the metric, or the only one.
    """

    path: Path
    metric: PairMetric
    key: str | None = None

    @property
    def ids(self) -> list[str] | None:
        """Ids of its samples, in order; None for files that have none, whose rows are those of the table.

        Raises:
            DataError: where the file cannot be read, or has ids twice.
        """
        return self._read[0]

    @property
    def values(self) -> NDArray[np.float64]:
        """Distances, (samples, samples) float64, symmetric, with a diagonal of 0.

        Raises:
            DataError: for what is no matrix of distances.
        """
        return self._read[1]

    @cached_property
    def digest(self) -> str:
        """What the file holds, in hex."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @cached_property
    def _read(self) -> tuple[list[str] | None, NDArray[np.float64]]:
        if not self.path.is_file():
            raise DataError(f"{self} is not there; give a matrix of distances")
        readers = {
            ".npy": self._npy, ".npz": self._npz, ".h5": self._h5, ".hdf5": self._h5, ".tsv": self._tsv,
            ".txt": self._tsv, ".qza": self._qza,
        }  # fmt: skip
        reader = readers.get(self.path.suffix.lower())
        if reader is None:
            raise ConfigError(f"{self}: distances are read from {', '.join(readers)}")
        try:
            ids, found = reader()
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, DataError | ConfigError):
                raise
            raise DataError(f"{self} cannot be read: {error}") from error
        if ids is not None and (doubles := twice(ids)):
            raise DataError(
                f"{self} has ids more than once: {how_many(doubles, len(ids), 'ids')}; keep one row of each"
            )
        return ids, self._checked(ids, np.asarray(found))

    # formats ----------------------------------------------------------------------------------------------------

    def _npy(self) -> tuple[list[str] | None, NDArray[Any]]:
        return None, np.load(self.path, allow_pickle=False)

    def _npz(self) -> tuple[list[str] | None, NDArray[Any]]:
        with np.load(self.path, allow_pickle=False) as arrays:
            ids = next((arrays[name] for name in _IDS if name in arrays), None)
            name = self._chosen({name: arrays[name].ndim for name in arrays if name not in _IDS})
            return _strings(ids), arrays[name]

    def _h5(self) -> tuple[list[str] | None, NDArray[Any]]:
        import h5py

        with h5py.File(self.path) as file:
            arrays = {name: one for name, one in file.items() if isinstance(one, h5py.Dataset)}
            ids = next((arrays[name].asstr()[:] for name in _IDS if name in arrays), None)
            name = self._chosen({name: one.ndim for name, one in arrays.items() if one.dtype.kind == "f"})
            return _strings(ids), arrays[name][:]

    def _tsv(self) -> tuple[list[str] | None, NDArray[Any]]:
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            return self._lines(file)

    def _qza(self) -> tuple[list[str] | None, NDArray[Any]]:
        with zipfile.ZipFile(self.path) as archive:
            inside = [name for name in archive.namelist() if name.endswith("/data/distance-matrix.tsv")]
            if len(inside) != 1:
                raise DataError(f"{self} is no DistanceMatrix of QIIME 2: it has no data/distance-matrix.tsv")
            with archive.open(inside[0]) as file:
                return self._lines(io.TextIOWrapper(file, encoding="utf-8"))

    def _lines(self, lines: Iterable[str]) -> tuple[list[str], NDArray[Any]]:
        """A table whose header has an empty field and the ids, and whose lines have an id and the distances."""
        ids: list[str] | None = None
        names, rows = [], []
        for number, line in enumerate(csv.reader(lines, delimiter="\t"), start=1):
            if not any(line) or (ids is None and line[0].startswith("#")):
                continue
            if ids is None:
                ids = line[1:]
                continue
            if len(line) != len(ids) + 1:
                raise DataError(f"{self}, line {number}: {len(line) - 1} distances, and the header has {len(ids)} ids")
            names.append(line[0])
            try:
                rows.append(np.array(line[1:], dtype=np.float64))
            except ValueError as error:
                raise DataError(f"{self}, line {number}: {error}; distances are numbers") from error
        if ids is None:
            raise DataError(f"{self} is empty; its first line should be a tab and the ids")
        for row, (name, column) in enumerate(zip(names, ids, strict=False)):
            if name != column:
                raise DataError(
                    f"{self}: row {row + 1} is of '{name}', and column {row + 1} of '{column}'; order them alike"
                )
        return ids, np.array(rows).reshape(len(rows), len(ids))

    def _chosen(self, arrays: Mapping[str, int]) -> str:
        """The array that holds the metric, of those that are there, by name with their numbers of axes."""
        if self.key is not None:
            if self.key not in arrays:
                raise ConfigError(
                    f"data.distances_key={self.key}: {self.path} has {examples(list(arrays)) or 'nothing'}"
                )
            return self.key
        found = [name for name in arrays if name.lower() in NAMES[self.metric]]
        if not found and "matrix" in arrays:  # as scikit-bio and unifrac-binaries call it, beside an ordination
            found = ["matrix"]
        if not found and len(arrays) == 1:
            found = [name for name in arrays if not any(name.lower() in names for names in NAMES.values())]
        if len(found) != 1:
            raise ConfigError(
                f"{self} has {examples(list(arrays)) or 'no arrays'}, and data.metric={self.metric}: say by "
                "data.distances_key which array it is"
            )
        return found[0]

    # what distances are -----------------------------------------------------------------------------------------

    def _checked(self, ids: Sequence[str] | None, found: NDArray[Any]) -> NDArray[np.float64]:
        if found.dtype.kind not in "fiu":
            raise DataError(f"{self} holds {found.dtype}, and distances are numbers")
        square = _square(found.astype(np.float64))
        if square is None:
            raise DataError(f"{self} is of shape {found.shape}; a matrix of distances is square, a row for each sample")
        matrix = square
        if ids is not None and len(ids) != len(matrix):
            raise DataError(f"{self} has {len(ids)} ids and {len(matrix)} rows; it should have an id for each row")
        name = [f"row {number}" for number in range(len(matrix))] if ids is None else ids

        def refuse(wrong: NDArray[np.bool_], what: str, remedy: str) -> None:
            if wrong.any():
                pairs = [f"{matrix[i, j]:g} between {name[i]} and {name[j]}" for i, j in np.argwhere(wrong)[:4]]
                raise DataError(
                    f"{self}: {int(wrong.sum())} of {matrix.size} values are {what} ({examples(pairs)}); {remedy}"
                )

        refuse(~np.isfinite(matrix), "no finite numbers", "compute them again, without samples that have no reads")
        refuse(matrix < 0, "below 0", "distances are not; is it another kind of matrix?")
        close = _SAME * max(float(matrix.max(initial=0.0)), 1e-300)
        refuse(np.diag(np.diag(matrix) > close), "of a sample to itself and not 0", "is it a matrix of similarities?")
        refuse(np.abs(matrix - matrix.T) > close, "not what the other half of the matrix has", "it should be symmetric")
        if self.metric in BOUNDED:
            refuse(matrix > 1 + _SAME, f"above 1, which no {self.metric} is", "choose its data.metric")
        matrix = (matrix + matrix.T) / 2
        np.fill_diagonal(matrix, 0.0)
        return matrix

    def __str__(self) -> str:
        return f"{self.path} (data.distances)"


def aligned(matrix: Matrix, samples: Sequence[str], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The distances between some samples, by their ids, else by their rows in the table, (samples, samples)."""
    if matrix.ids is not None:
        row = {name: number for number, name in enumerate(matrix.ids)}
        rows = np.array([row[name] for name in samples], dtype=np.int64)
    return matrix.values[np.ix_(rows, rows)]


def _strings(ids: Any) -> list[str] | None:
    return None if ids is None else [name.decode() if isinstance(name, bytes) else str(name) for name in ids]


def _square(values: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """A square matrix, or the half of one that is written row by row, as a square matrix; None for all else."""
    if values.ndim == 1:
        size = round((1 + (1 + 8 * len(values)) ** 0.5) / 2)
        if size * (size - 1) // 2 != len(values) or not len(values):
            return None
        matrix = np.zeros((size, size))
        matrix[np.triu_indices(size, 1)] = values
        return matrix + matrix.T
    return values if values.ndim == 2 and values.shape[0] == values.shape[1] else None
