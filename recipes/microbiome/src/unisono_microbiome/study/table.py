"""A table of counts, samples by taxa, from a BIOM file: version 2 (HDF5) or version 1 (JSON)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, UnisonoError, file_hash
from unisono.recipe_tools import check_hdf5, find_duplicates, format_examples, format_share, safe_paths
from unisono_microbiome.study import artifacts
from unisono_microbiome.study.sparse import from_entries, read_blocks, select_blocks
from unisono_microbiome.study.storage import Storage

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_HDF5 = b"\x89HDF\r\n\x1a\n"
_BLOCK = 1 << 20  # entries that are hashed at a time


@dataclass(frozen=True, eq=False)
class CountTable:
    """Reads per sample and taxon.

    Attributes:
        samples: their ids.
        taxa: their ids.
        counts: (samples, taxa) int64; zeros are not stored.
        taxonomy: lineage per taxon, where the file has it.
        storage: where the entries of what is computed from it are kept, as its own are.
    """

    samples: list[str]
    taxa: list[str]
    counts: csr_array
    taxonomy: list[str] | None = None
    storage: Storage = field(default_factory=Storage)

    @property
    def depths(self) -> NDArray[np.int64]:
        """Reads of each sample, (samples,)."""
        return np.asarray(self.counts.sum(axis=1), dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """What it holds, in hex, the lineages left out."""
        found = hashlib.sha256(json.dumps([self.samples, self.taxa]).encode())
        for part in (self.counts.indptr, self.counts.indices, self.counts.data):
            for first in range(0, len(part), _BLOCK):
                found.update(part[first : first + _BLOCK].astype("<i8").tobytes())
        return found.hexdigest()[:32]

    def count_reads(self, taxa: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Reads of each sample of some taxa, (samples,)."""
        return np.asarray(self.counts @ taxa.astype(np.int64), dtype=np.int64)

    def select(self, samples: NDArray[np.int64], taxa: NDArray[np.int64]) -> CountTable:
        """Some samples and some taxa of it, in these orders."""
        lineages = None if self.taxonomy is None else [self.taxonomy[number] for number in taxa]
        counts = self.counts
        if not (_is_all(samples, len(self.samples)) and _is_all(taxa, len(self.taxa))):
            chosen = hashlib.sha256(samples.astype("<i8").tobytes() + taxa.astype("<i8").tobytes())
            blocks = select_blocks(counts, samples, taxa, f"a selection of {len(samples)} samples, {len(taxa)} taxa")
            sizes = [len(samples), len(taxa)]
            counts = self.storage.keep(blocks, lambda: ["selected", self.digest, *sizes, chosen.hexdigest()])
        names = [self.samples[number] for number in samples], [self.taxa[number] for number in taxa]
        return CountTable(*names, counts, lineages, self.storage)


def _is_all(numbers: NDArray[np.int64], size: int) -> bool:
    return np.array_equal(numbers, np.arange(size))


def read_table(path: Path, storage: Storage | None = None) -> CountTable:
    """The table of a BIOM file, or of a QIIME 2 artifact `FeatureTable[Frequency]`.

    Args:
        path: of the file.
        storage: where its entries are kept; None for memory, or the user's cache if they do not fit.

    Raises:
        DataError: for a file that is none, ids that occur twice, and what is no count.
    """
    artifacts.check_file(path, "data.table", "a BIOM table, HDF5 or JSON, or a .qza")
    with artifacts.open_data(path, "data.table") as inner:
        return _read_biom(inner, storage or Storage())


def _read_biom(path: Path, storage: Storage) -> CountTable:
    with safe_paths.open_regular(path) as file:
        start = file.read(64)
        file.seek(0)
        opened = safe_paths.path_of(file)

        def find_address() -> list[str]:
            return ["table", file_hash(Path(opened))]

        with _wrap_errors(path):
            if start.startswith(_HDF5):
                check_hdf5(path, f"{path} (data.table)")
                return _read_hdf5(path, opened, storage, find_address)
            if start.lstrip().startswith(b"{"):
                content = safe_paths.read_limited(file, str(path), safe_paths.WHOLE)
                return _read_json(path, safe_paths.parse_json(content, dict[str, Any]), storage, find_address)
    raise DataError(
        f"{path} (data.table) is neither BIOM 2 (HDF5) nor BIOM 1 (JSON); it begins with {start[:16]!r}. "
        "Convert tab-separated tables with `biom convert --to-hdf5`"
    )


@contextmanager
def _wrap_errors(path: Path) -> Iterator[None]:
    """Whatever h5py and json raise for a damaged file, and lookups in it, as an error that names the file."""
    try:
        yield
    except UnisonoError:
        raise
    except Exception as error:
        raise DataError(
            f"{path} (data.table) is not a readable BIOM table ({type(error).__name__}: {error}); `biom "
            "validate-table -i` says what it lacks"
        ) from error


def _read_hdf5(path: Path, opened: str, storage: Storage, find_address: Callable[[], Any]) -> CountTable:
    """A table of version 2: its matrix is stored by samples and by taxa, and the former is read."""
    import h5py

    with h5py.File(opened) as hdf5:
        samples, taxa = _read_ids(hdf5, "sample"), _read_ids(hdf5, "observation")
        _check_ids(path, samples, taxa)
        starts, columns, values = (hdf5[f"sample/matrix/{name}"] for name in ("indptr", "indices", "data"))

        def count(block: csr_array, first: int) -> csr_array:
            return _counts(path, samples[first : first + block.shape[0]], block)

        read = read_blocks(starts[:], columns, values, (len(samples), len(taxa)), f"{path} (data.table)", count)

        def generate() -> Iterator[csr_array]:
            with _wrap_errors(path):  # while it is written, an error of the operating system is one of the cache
                yield from read.generate()

        matrix = storage.keep(replace(read, generate=generate), find_address)
        lineages = hdf5.get("observation/metadata/taxonomy")
        ranks = None if lineages is None else [_decode(one) for one in lineages[:]]
    return CountTable(samples, taxa, matrix, _join_lineages(ranks, taxa), storage)


def _read_json(path: Path, described: Any, storage: Storage, find_address: Callable[[], Any]) -> CountTable:
    """A table of version 1, read whole: its entries are listed by row (a taxon) and column, or row by row."""
    samples, taxa = ([_text_id(one["id"]) for one in described[axis]] for axis in ("columns", "rows"))
    _check_ids(path, samples, taxa)
    if (shape := described.get("shape", [len(taxa), len(samples)])) != [len(taxa), len(samples)]:
        raise ValueError(f"its shape is {shape!r:.80}, and it lists {len(taxa)} taxa, {len(samples)} samples")
    if described.get("matrix_type", "sparse") == "dense":
        dense = np.asarray(described["data"], dtype=np.float64)  # (taxa, samples)
        if dense.shape != (len(taxa), len(samples)):
            raise DataError(
                f"{path} (data.table) has {dense.shape} numbers for {len(taxa)} taxa, {len(samples)} samples"
            )
        rows, columns = np.nonzero(dense)
        entries: Any = (columns, rows, dense[rows, columns])
    else:
        entries = tuple(zip(*((column, row, value) for row, column, value in described["data"]), strict=True))
    of_samples, of_taxa, values = entries or ((), (), ())
    matrix = from_entries(of_samples, of_taxa, values, (len(samples), len(taxa)), f"{path} (data.table)")
    every = np.arange(len(samples)), np.arange(len(taxa))
    blocks = select_blocks(_counts(path, samples, matrix), *every, f"{path} (data.table)")
    matrix = storage.keep(blocks, find_address)
    ranks = [(one.get("metadata") or {}).get("taxonomy") for one in described["rows"]]
    return CountTable(samples, taxa, matrix, _join_lineages(ranks, taxa), storage)


def _text_id(given: Any) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError(f"the id {given!r:.80} is no text")
    return str(given)


def _read_ids(hdf5: Any, axis: str) -> list[str]:
    return [str(name) for name in hdf5[f"{axis}/ids"].asstr()[:]] if len(hdf5[f"{axis}/ids"]) else []


def _check_ids(path: Path, samples: list[str], taxa: list[str]) -> None:
    if not samples or not taxa:
        raise DataError(f"{path} (data.table) is empty: {len(samples)} samples, {len(taxa)} taxa")
    for what, names in (("samples", samples), ("taxa", taxa)):
        if "" in names:
            raise DataError(f"{path} (data.table) has an empty id among its {what}; give every one an id")
        if doubles := find_duplicates(names):
            raise DataError(
                f"{path} (data.table) has duplicate ids: {format_share(doubles, len(names), what)}; sum or rename them"
            )


def _counts(path: Path, samples: list[str], matrix: csr_array) -> csr_array:
    matrix.eliminate_zeros()
    for what, wrong in (
        ("not finite", ~np.isfinite(matrix.data)),
        ("below 0", matrix.data < 0),
        ("not whole numbers", matrix.data != np.round(matrix.data)),
        ("above 2^53", matrix.data > 2**53),
    ):
        if wrong.any():
            rows = np.repeat(np.arange(len(samples)), np.diff(matrix.indptr))[wrong]
            shown = [f"{value:g} in {samples[row]}" for value, row in zip(matrix.data[wrong][:3], rows, strict=False)]
            raise DataError(
                f"{path} (data.table): {int(wrong.sum())} of {matrix.nnz} entries are {what} "
                f"({format_examples(shown)}). Give raw read counts, not shares or logarithms"
            )
    return matrix.astype(np.int64)


def _decode(value: Any) -> Any:
    """The text of a value of HDF5, or of a list of such values without those that are empty."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return value if isinstance(value, str) else [_decode(one) for one in value if one]


def _join_lineages(ranks: list[Any] | None, taxa: list[str]) -> list[str] | None:
    """The taxonomy that a table has itself: a list of ranks per taxon, or a string; None unless every taxon has one."""
    if ranks is None or len(ranks) != len(taxa) or not all(ranks):
        return None
    return [rank if isinstance(rank, str) else "; ".join(map(str, rank)) for rank in ranks]
