"""A table of counts, samples by taxa, from a BIOM file: version 2 (HDF5) or version 1 (JSON), read by biom-format."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, UnisonoError, check_hdf5, find_duplicates, format_examples, format_share, import_extra

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_HDF5 = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class CountTable:
    """Reads per sample and taxon.

    Attributes:
        samples: their ids.
        taxa: their ids.
        counts: (samples, taxa) int64; zeros are not stored.
        taxonomy: lineage per taxon, where the file has it.
    """

    samples: list[str]
    taxa: list[str]
    counts: csr_array
    taxonomy: list[str] | None = None

    @property
    def depths(self) -> NDArray[np.int64]:
        """Reads of each sample, (samples,)."""
        return np.asarray(self.counts.sum(axis=1), dtype=np.int64)

    @property
    def digest(self) -> str:
        """What it holds, in hex, the lineages left out."""
        found = hashlib.sha256(json.dumps([self.samples, self.taxa]).encode())
        for part in (self.counts.indptr, self.counts.indices, self.counts.data):
            found.update(part.astype("<i8").tobytes())
        return found.hexdigest()[:32]

    def select(self, samples: NDArray[np.int64], taxa: NDArray[np.int64]) -> CountTable:
        """Some samples and some taxa of it, in these orders."""
        lineages = None if self.taxonomy is None else [self.taxonomy[number] for number in taxa]
        counts = self.counts if len(samples) == len(self.samples) else self.counts[samples]
        counts = counts if len(taxa) == len(self.taxa) else counts[:, taxa]
        counts.sort_indices()  # which scipy does not promise
        return CountTable([self.samples[n] for n in samples], [self.taxa[n] for n in taxa], counts, lineages)


def read_table(path: Path) -> CountTable:
    """The table of a BIOM file.

    Raises:
        ConfigError: where biom-format is not installed.
        DataError: for a file that is none, ids that occur twice, and what is no count.
    """
    if not path.is_file():
        raise DataError(f"{path} (data.table) does not exist; give a BIOM table, HDF5 or JSON")
    biom = import_extra("biom", "microbiome", "data.table")
    with path.open("rb") as file:
        start = file.read(64)
    try:
        if start.startswith(_HDF5):
            import h5py

            check_hdf5(path, f"{path} (data.table)")
            with h5py.File(path) as hdf5:
                _check_unique_ids(path, *(_read_ids(hdf5, axis) for axis in ("sample", "observation")))
                table = biom.Table.from_hdf5(hdf5)
        elif start.lstrip().startswith(b"{"):
            described = json.loads(path.read_text(encoding="utf-8"))
            _check_unique_ids(path, *([str(e["id"]) for e in described[axis]] for axis in ("columns", "rows")))
            table = biom.Table.from_json(described)
        else:
            raise DataError(
                f"{path} (data.table) is neither BIOM 2 (HDF5) nor BIOM 1 (JSON); it begins with {start[:16]!r}. "
                "Convert tab-separated tables with `biom convert --to-hdf5`; unpack a .qza with `qiime tools export`"
            )
    except UnisonoError:
        raise
    except Exception as error:  # whatever h5py, json and biom-format raise for a damaged file
        raise DataError(
            f"{path} (data.table) is not a readable BIOM table ({type(error).__name__}: {error}); `biom "
            "validate-table -i` says what it lacks"
        ) from error
    return _validate(path, table)


def _read_ids(hdf5: Any, axis: str) -> list[str]:
    return [str(name) for name in hdf5[f"{axis}/ids"].asstr()[:]] if len(hdf5[f"{axis}/ids"]) else []


def _check_unique_ids(path: Path, samples: list[str], taxa: list[str]) -> None:
    for what, names in (("samples", samples), ("taxa", taxa)):
        if doubles := find_duplicates(names):
            raise DataError(
                f"{path} (data.table) has duplicate ids: {format_share(doubles, len(names), what)}; sum or rename them"
            )


def _validate(path: Path, table: Any) -> CountTable:
    """The counts of a table, as integers."""
    from scipy.sparse import csr_array

    samples = [str(name) for name in table.ids(axis="sample")]
    taxa = [str(name) for name in table.ids(axis="observation")]
    if not samples or not taxa:
        raise DataError(f"{path} (data.table) is empty: {len(samples)} samples, {len(taxa)} taxa")
    matrix = csr_array(table.matrix_data.T.tocsr())
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    for what, wrong in (
        ("not finite", ~np.isfinite(matrix.data)),
        ("below 0", matrix.data < 0),
        ("not whole numbers", matrix.data != np.round(matrix.data)),
    ):
        if wrong.any():
            rows = np.repeat(np.arange(len(samples)), np.diff(matrix.indptr))[wrong]
            shown = [f"{value:g} in {samples[row]}" for value, row in zip(matrix.data[wrong][:3], rows, strict=False)]
            raise DataError(
                f"{path} (data.table): {int(wrong.sum())} of {matrix.nnz} entries are {what} "
                f"({format_examples(shown)}). Give raw read counts, not shares or logarithms"
            )
    return CountTable(samples, taxa, matrix.astype(np.int64), _read_lineages(table, taxa))


def _read_lineages(table: Any, taxa: list[str]) -> list[str] | None:
    """The taxonomy that a table has itself: a list of ranks per taxon, or a string."""
    found = table.metadata(axis="observation")
    if found is None or not all(one and one.get("taxonomy") for one in found):
        return None
    ranks = [one["taxonomy"] for one in found]
    return [rank if isinstance(rank, str) else "; ".join(map(str, rank)) for rank in ranks]
