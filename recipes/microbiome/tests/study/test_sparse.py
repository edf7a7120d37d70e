"""Whatever the index of a sparse matrix claims, no native code follows it before it was checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from recipes.microbiome.tests.studies import COUNTS, SAMPLES, TAXA, table, write_hdf5
from unisono.runtime.errors import DataError
from unisono_microbiome.study import sparse
from unisono_microbiome.study.sparse import from_compressed, from_entries
from unisono_microbiome.study.table import read_table

WHOLE = csr_array(COUNTS)
ODD = (0, -1, 1, 5, 6, 7, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1)


@pytest.mark.parametrize("name", ["indptr", "indices"])
@pytest.mark.parametrize("value", ODD)
def test_a_table_whose_index_lies_is_refused_or_holds_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    """Every place of either array, replaced: the read of such a table ended the process, or changed its sums."""
    monkeypatch.setattr("unisono_microbiome.study.table.check_hdf5", lambda *_: None)  # a process for each file
    path = write_hdf5(tmp_path / "t.biom")
    with h5py.File(path, "r+") as file:
        honest = file[f"sample/matrix/{name}"][:]
        del file[f"sample/matrix/{name}"]
        file[f"sample/matrix/{name}"] = honest.astype(np.int64)
    for place in range(len(honest)):
        forged = honest.astype(np.int64)
        forged[place] = value
        with h5py.File(path, "r+") as file:
            file[f"sample/matrix/{name}"][:] = forged
        try:
            found = read_table(path)
        except DataError as error:
            assert "damaged or forged" in str(error) or "in a place that has one already" in str(error)
        else:
            assert found.counts.sum() == COUNTS.sum()
            found.counts.check_format(full_check=True)


@given(
    st.lists(st.integers(-3, 12), min_size=1, max_size=5),
    st.lists(st.integers(-2, 5), max_size=12),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_three_arrays_are_a_whole_matrix_or_refused(
    starts: list[int], columns: list[int], rows: int, width: int
) -> None:
    values = np.arange(1, len(columns) + 1)
    try:
        found = from_compressed(starts, columns, values, (rows, width), "m")
    except DataError:
        return
    found.check_format(full_check=True)
    assert found.has_canonical_format
    assert found.toarray().sum() == values.sum()


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), max_size=6))
def test_entries_are_a_whole_matrix_or_refused(places: list[tuple[int, int]]) -> None:
    values = np.arange(1, len(places) + 1)
    rows, columns = zip(*places, strict=True) if places else ((), ())
    honest = len(set(places)) == len(places) and all(0 <= a < 3 and 0 <= b < 3 for a, b in places)
    try:
        found = from_entries(rows, columns, values, (3, 3), "m")
    except DataError:
        assert not honest
        return
    assert honest
    assert [found.toarray()[place] for place in places] == values.tolist()


@pytest.mark.parametrize(
    "entry", [[-1, 0, 1], [6, 0, 1], [0, 8, 1], [0, 2**70, 1], [0.5, 0, 1], ["0", 0, 1], [0, 0], [0, 0, "x"]]
)
def test_an_entry_of_a_json_table_that_lies_outside_is_refused(tmp_path: Path, entry: list[Any]) -> None:
    described = json.loads(table(COUNTS, SAMPLES, TAXA).to_json("tests"))
    described["data"].append(entry)
    (tmp_path / "t.biom").write_text(json.dumps(described))
    with pytest.raises(DataError):
        read_table(tmp_path / "t.biom")


def test_lineages_of_a_table_in_hdf5_are_read(tmp_path: Path) -> None:
    """The reader is ours, so what biom-format writes into metadata is read back."""
    made = table(COUNTS, SAMPLES, TAXA)
    made.add_metadata({t: {"taxonomy": ["k__B", f"p__{t}"]} for t in TAXA}, "observation")
    with h5py.File(tmp_path / "t.biom", "w") as file:
        made.to_hdf5(file, "tests")
    assert read_table(tmp_path / "t.biom").taxonomy == [f"k__B; p__{t}" for t in TAXA]


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_a_table_read_in_blocks_is_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = write_hdf5(tmp_path / "t.biom")
    monkeypatch.setattr(sparse, "_BLOCK", size)
    found = read_table(path).counts
    found.check_format(full_check=True)
    assert found.dtype == np.int64
    assert np.array_equal(found.toarray(), COUNTS)
