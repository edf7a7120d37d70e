"""Ready distances are read from every format alike, and what cannot be a matrix of distances is refused."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from skbio import DistanceMatrix

from recipes.microbiome.tests.studies import COUNTS, SAMPLES, unweighted, write_matrix
from unisono.runtime.errors import ConfigError, DataError
from unisono_microbiome.study import artifacts
from unisono_microbiome.study.matrices import Matrix, align_matrix

TRUE = unweighted(COUNTS)
HALF = TRUE[np.triu_indices(8, 1)]


def matrix(path: Path, key: str | None = None, metric="unweighted_unifrac") -> Matrix:
    return Matrix(path, metric, key)


def test_every_format_gives_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "square.npy", TRUE)
    np.save(tmp_path / "half.npy", HALF)
    np.savez(tmp_path / "named.npz", sample_ids=np.array(SAMPLES), unweighted=TRUE, weighted=TRUE * 3)
    with h5py.File(tmp_path / "unifrac.h5", "w") as file:
        file["order"], file["matrix"], file["pcoa_eigvals"] = list(SAMPLES), TRUE, TRUE[0]
    write_matrix(tmp_path / "lines.tsv", SAMPLES, TRUE)
    lines = (tmp_path / "lines.tsv").read_bytes()
    artifacts.write_artifact(tmp_path / "artifact.qza", "DistanceMatrix", "DirFmt", {"distance-matrix.tsv": lines})
    with h5py.File(tmp_path / "fixed.h5", "w") as file:
        file["order"], file["matrix"] = np.array(SAMPLES, dtype="S4"), HALF
    np.savez(tmp_path / "bytes.npz", ids=np.array(SAMPLES, dtype="S4"), unweighted_unifrac=HALF)
    paths = sorted(path for path in tmp_path.iterdir())
    assert len(paths) == 8
    for path in paths:
        found = matrix(path)
        assert found.ids == (None if path.suffix == ".npy" else list(SAMPLES))
        assert found.values.dtype == np.float64
        assert np.array_equal(found.values, TRUE), path


def test_what_scikit_bio_writes_is_read(tmp_path: Path) -> None:
    DistanceMatrix(TRUE, SAMPLES).write(str(tmp_path / "d.tsv"))
    found = matrix(tmp_path / "d.tsv")
    assert found.ids == list(SAMPLES)
    assert np.array_equal(found.values, TRUE)


def test_samples_are_found_by_their_ids_and_else_by_their_rows(tmp_path: Path) -> None:
    order = [3, 0, 7, 1, 2, 6, 5, 4]
    write_matrix(tmp_path / "d.tsv", [SAMPLES[n] for n in order], TRUE[np.ix_(order, order)])
    wanted = [6, 2, 0]
    found = align_matrix(matrix(tmp_path / "d.tsv"), [SAMPLES[n] for n in wanted], np.array(wanted))
    assert np.array_equal(found, TRUE[np.ix_(wanted, wanted)])
    assert not np.array_equal(found, TRUE[np.ix_([0, 1, 2], [0, 1, 2])])
    np.save(tmp_path / "d.npy", TRUE)
    assert np.array_equal(align_matrix(matrix(tmp_path / "d.npy"), ["x", "y", "z"], np.array(wanted)), found)


def test_an_array_is_chosen_by_the_metric_or_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, ids=np.array(SAMPLES), unweighted=TRUE, weighted_normalized=TRUE / 2, mine=TRUE / 4)
    assert np.array_equal(matrix(path).values, TRUE)
    assert np.array_equal(matrix(path, metric="weighted_normalized_unifrac").values, TRUE / 2)
    assert np.array_equal(matrix(path, "mine").values, TRUE / 4)
    with pytest.raises(
        ConfigError, match=r"has 'unweighted', 'weighted_normalized', 'mine', but none for data\.metric=jaccard"
    ):
        _ = matrix(path, metric="jaccard").values
    with pytest.raises(ConfigError, match=r"data\.distances_key=none: "):
        _ = matrix(path, "none").values


def test_the_only_array_is_taken_unless_it_is_called_like_another_metric(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", whatever=TRUE)
    assert np.array_equal(matrix(tmp_path / "d.npz", metric="jaccard").values, TRUE)
    np.savez(tmp_path / "d.npz", unweighted=TRUE)
    with pytest.raises(ConfigError, match=r"has 'unweighted', but none for data\.metric=jaccard"):
        _ = matrix(tmp_path / "d.npz", metric="jaccard").values


def wrong(place: tuple[int, int], value: float) -> np.ndarray:
    copy = TRUE.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (TRUE[:5], r"has shape \(5, 8\); a distance matrix is square"),
        (HALF[:-1], r"has shape \(27,\)"),
        (TRUE[None], r"has shape \(1, 8, 8\)"),
        (wrong((1, 2), np.nan), r"1 of 64 values are not finite \('nan between s2 and s3'\)"),
        (wrong((1, 2), np.inf), r"not finite \('inf between s2 and s3'\)"),
        (wrong((1, 2), -0.1), r"below 0 \('-0\.1 between s2 and s3'\)"),
        (wrong((3, 3), 0.2), r"of a sample to itself and not 0 \('0\.2 between s4 and s4'\)"),
        (wrong((1, 2), TRUE[1, 2] + 0.01), r"2 of 64 values are different in the other half .*between s2 and s3', '0"),
        (TRUE * 1.5, r"above 1, the maximum of unweighted_unifrac"),
        (np.array([["a"] * 8] * 8), "has dtype <U1, but distances must be numbers"),
    ],
)
def test_what_is_no_matrix_of_distances_is_refused(tmp_path: Path, values: np.ndarray, told: str) -> None:
    assert not np.array_equal(values, TRUE)
    np.savez(tmp_path / "d.npz", ids=np.array(SAMPLES), unweighted=values)
    with pytest.raises(DataError, match=rf"d\.npz \(data\.distances\).*{told}"):
        _ = matrix(tmp_path / "d.npz").values


def test_what_fp32_leaves_between_both_halves_is_made_even(tmp_path: Path) -> None:
    rounded = TRUE + np.triu(np.full((8, 8), 3e-8), 1)
    assert not np.array_equal(rounded, rounded.T)
    np.savez(tmp_path / "d.npz", unweighted=rounded)
    found = matrix(tmp_path / "d.npz").values
    assert np.array_equal(found, found.T)
    assert np.allclose(found, TRUE, atol=1e-7)
    np.savez(tmp_path / "d.npz", weighted=TRUE * 5)  # which is above 1, and may be
    assert matrix(tmp_path / "d.npz", metric="weighted_unifrac").values.max() > 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("d.tsv", "", "is empty"),
        ("d.tsv", "\ts1\ts2\ns1\t0\n", "line 2: 1 distances, but the header has 2 ids"),
        ("d.tsv", "\ts1\ts2\ns1\t0\tx\n", "line 2: could not convert string to float: .*x"),
        ("d.tsv", "\ts1\ts2\ns2\t0\t1\ns1\t1\t0\n", "row 1 is 's2', but column 1 is 's1'"),
        ("d.tsv", "\ts1\ts1\ns1\t0\t1\ns1\t1\t0\n", r"duplicate ids: 1 of 2 ids \('s1'\)"),
        ("d.tsv", "\ts1\ts2\ns1\t0\t1\n", r"has shape \(1, 2\)"),
        ("d.npy", "junk", "cannot be read"),
        ("d.npz", "junk", "cannot be read"),
        ("d.h5", "junk", "cannot be read"),
        ("d.qza", "junk", "is not a readable QIIME 2 artifact: File is not a zip file"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name} \(data\.distances\).*{told}"):
        _ = matrix(tmp_path / name).values


def test_nothing_that_is_pickled_is_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.array([[0, None], [None, 0]], dtype=object))
    with pytest.raises(DataError, match=r"cannot be read: .*Python objects in dtype"):
        _ = matrix(tmp_path / "d.npy").values


def test_ids_and_formats_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        _ = matrix(tmp_path / "d.npy").values
    (tmp_path / "d.mat").write_text("x")
    with pytest.raises(ConfigError, match=r"unsupported format; use \.npy, \.npz, \.h5, \.hdf5, \.tsv, \.txt, \.qza"):
        _ = matrix(tmp_path / "d.mat").values
    np.savez(tmp_path / "d.npz", ids=np.array(SAMPLES[:5]), unweighted=TRUE)
    with pytest.raises(DataError, match="has 5 ids but 8 rows"):
        _ = matrix(tmp_path / "d.npz").values


def test_ids_that_are_no_list_are_refused(tmp_path: Path) -> None:
    """A table of ids became names such as "['a' 'b']"."""
    np.savez(tmp_path / "d.npz", ids=np.array([SAMPLES] * 8), unweighted_unifrac=TRUE)
    with pytest.raises(DataError, match=r"d\.npz \(data\.distances\) cannot be read: its ids have shape \(8, 8\)"):
        _ = matrix(tmp_path / "d.npz").values
