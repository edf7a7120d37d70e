"""Tables are read from both versions of BIOM, and what is no count is refused."""

from __future__ import annotations

import json
from pathlib import Path

import biom
import h5py
import numpy as np
import pytest

from recipes.microbiome.tests.studies import COUNTS, SAMPLES, TAXA, table, write_hdf5, write_json
from unisono.runtime.errors import DataError
from unisono_microbiome.study.table import read_table


def test_both_versions_hold_the_same(tmp_path: Path) -> None:
    one, other = read_table(write_hdf5(tmp_path / "a.biom")), read_table(write_json(tmp_path / "b.biom"))
    for found in (one, other):
        assert (found.samples, found.taxa) == (list(SAMPLES), list(TAXA))
        assert found.counts.toarray().tolist() == COUNTS.tolist()
        assert found.counts.dtype == np.int64
        assert found.counts.nnz == (COUNTS > 0).sum()
        assert found.depths.tolist() == COUNTS.sum(1).tolist()
    assert one.digest == other.digest
    changed = COUNTS.copy()
    changed[0, 0] += 1
    assert read_table(write_json(tmp_path / "c.biom", changed)).digest != one.digest


def test_taxa_of_a_sample_are_in_ascending_order_whatever_the_file_has(tmp_path: Path) -> None:
    described = json.loads(table(COUNTS, SAMPLES, TAXA).to_json("tests"))
    described["data"] = described["data"][::-1]
    path = tmp_path / "t.biom"
    path.write_text(json.dumps(described))
    found = read_table(path)
    assert found.counts.toarray().tolist() == COUNTS.tolist()
    assert all(
        (np.diff(found.counts.indices[a:b]) > 0).all()
        for a, b in zip(found.counts.indptr, found.counts.indptr[1:], strict=False)
    )


def test_zeros_that_a_file_holds_are_not_stored(tmp_path: Path) -> None:
    described = json.loads(table(COUNTS, SAMPLES, TAXA).to_json("tests"))
    for entry in described["data"][:3]:
        entry[2] = 0
    (tmp_path / "j.biom").write_text(json.dumps(described))
    write_hdf5(tmp_path / "h.biom")
    with h5py.File(tmp_path / "h.biom", "r+") as file:
        for axis in ("sample", "observation"):
            file[f"{axis}/matrix/data"][:3] = 0
    for name in ("j.biom", "h.biom"):
        found = read_table(tmp_path / name)
        assert found.counts.nnz == (COUNTS > 0).sum() - 3
        assert found.counts.data.all()


def test_lineages_come_with_a_table_that_has_them(tmp_path: Path) -> None:
    for lineages in ([["k__B", f"p__{t}"] for t in TAXA], [f"k__B; p__{t}" for t in TAXA]):
        made = table(COUNTS, SAMPLES, TAXA)
        made.add_metadata({t: {"taxonomy": lineage} for t, lineage in zip(TAXA, lineages, strict=True)}, "observation")
        (tmp_path / "t.biom").write_text(made.to_json("tests"))
        assert read_table(tmp_path / "t.biom").taxonomy == [f"k__B; p__{t}" for t in TAXA]
    assert read_table(write_json(tmp_path / "u.biom")).taxonomy is None


def test_some_of_a_table_is_a_table(tmp_path: Path) -> None:
    some = read_table(write_json(tmp_path / "t.biom")).select(np.array([4, 1]), np.array([0, 3, 5]))
    assert (some.samples, some.taxa) == (["s5", "s2"], ["A", "D", "F"])
    assert some.counts.toarray().tolist() == COUNTS[[4, 1]][:, [0, 3, 5]].tolist()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.5, "not whole numbers .*'0.5 in s3'"),
        (-2.0, "below 0 .*'-2 in s3'"),
        (float("nan"), "not finite .*'nan in s3'"),
    ],
)
@pytest.mark.parametrize("write", [write_hdf5, write_json])
def test_what_is_no_count_is_refused(tmp_path: Path, write, value: float, told: str) -> None:
    counts = COUNTS.astype(np.float64)
    counts[2, 1] = value
    path = write(tmp_path / "t.biom", counts)
    if write is write_json:
        path.write_text(path.read_text().replace(",nan]", ",NaN]"))  # as JSON has it
    with pytest.raises(DataError, match=rf"1 of \d+ entries are {told}.*Give raw read counts"):
        read_table(path)


def test_a_table_that_says_it_holds_integers_and_does_not_is_refused(tmp_path: Path) -> None:
    described = json.loads(table(COUNTS, SAMPLES, TAXA).to_json("tests"))
    described["matrix_element_type"] = "int"
    described["data"][4][2] = 0.5
    (tmp_path / "t.biom").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"1 of .* entries are not whole numbers"):
        read_table(tmp_path / "t.biom")


def test_ids_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.biom"
    described = json.loads(table(COUNTS, SAMPLES, TAXA).to_json("tests"))
    described["columns"][3]["id"] = "s1"
    path.write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"duplicate ids: 1 of 8 samples \('s1'\)"):
        read_table(path)
    write_hdf5(path)
    with h5py.File(path, "r+") as file:
        file["observation/ids"][2] = "A"
    with pytest.raises(DataError, match=r"duplicate ids: 1 of 6 taxa \('A'\)"):
        read_table(path)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.biom"
    with pytest.raises(DataError, match="does not exist"):
        read_table(path)
    path.write_text("#OTU ID\ts1\nA\t3\n")
    with pytest.raises(DataError, match=r"neither BIOM 2 \(HDF5\) nor BIOM 1 \(JSON\); it begins with b'#OTU ID"):
        read_table(path)
    path.write_text('{"rows": [')
    with pytest.raises(DataError, match=r"is not a readable BIOM table \(JSONDecodeError"):
        read_table(path)
    path.write_bytes(write_hdf5(tmp_path / "whole.biom").read_bytes()[:700])
    with pytest.raises(DataError, match=r"cannot be read as HDF5 \(.*truncated file"):
        read_table(path)
    path.write_text(biom.Table(np.zeros((0, 0)), [], []).to_json("tests"))
    with pytest.raises(DataError, match="is empty: 0 samples, 0 taxa"):
        read_table(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shape": [2**40, 2]}, "its shape is"),
        ({"rows": [{"id": None}, {"id": "b"}]}, "the id None is no text"),
        ({"rows": [{"id": ""}, {"id": "b"}]}, "has an empty id among its taxa"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    described = {
        "rows": [{"id": "a"}, {"id": "b"}], "columns": [{"id": "s"}], "shape": [2, 1], "matrix_type": "sparse",
        "data": [[0, 0, 5], [1, 0, 7]],
    }  # fmt: skip
    (tmp_path / "t.biom").write_text(json.dumps(described))
    assert read_table(tmp_path / "t.biom").counts.toarray().tolist() == [[5, 7]]
    (tmp_path / "t.biom").write_text(json.dumps(described | changes))
    with pytest.raises(DataError, match=told):
        read_table(tmp_path / "t.biom")


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Python takes the last of two, and the reader of another language the first."""
    text = '{"rows": [{"id": "a"}], "columns": [{"id": "s"}], "data": [[0, 0, 1]], "data": [[0, 0, 9]]}'
    (tmp_path / "t.biom").write_text(text)
    with pytest.raises(DataError, match="the key 'data' twice"):
        read_table(tmp_path / "t.biom")
